{{/* What a schema cannot say: each line ends the rendering with what to do. */}}
{{- define "holdfast.validate" -}}
{{- $values := .Values -}}
{{- if not $values.models -}}
{{- fail "models: name at least one" -}}
{{- end -}}
{{- if and (not $values.redis.enabled) (not $values.redis.external.address) -}}
{{- fail "redis: enable the chart's own Redis or give redis.external.address" -}}
{{- end -}}
{{- if and (not $values.tenants.existingSecret) (not $values.tenants.list) (not $values.tenants.firstKey.enabled) -}}
{{- fail "tenants: without any, nobody is served; give existingSecret, list or firstKey" -}}
{{- end -}}
{{- if and $values.tenants.existingSecret $values.tenants.firstKey.enabled -}}
{{- fail "tenants: firstKey cannot be put into an existing Secret; set tenants.firstKey.enabled to false" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway to attach to" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.hosts: name at least one" -}}
{{- end -}}
{{- if eq $values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- include "holdfast.validateIncremental" . -}}
{{- end -}}
{{- include "holdfast.validateConfig" (list "config" .Values.config) -}}
{{- include "holdfast.validateConfig" (list "modelDefaults.config" .Values.modelDefaults.config) -}}
{{- range $name, $model := .Values.models -}}
{{- include "holdfast.validateConfig" (list (printf "models.%s.config" $name) (dig "config" dict ($model | default dict))) -}}
{{- end -}}
{{- include "holdfast.validateTenants" . -}}
{{- $prefixes := dict -}}
{{- range $name, $model := include "holdfast.models" . | fromYaml -}}
{{- include "holdfast.validateModel" (list $name $model) -}}
{{- if hasKey $prefixes $model.routePrefix -}}
{{- fail (printf "models: %s and %s have the same routePrefix %s" (get $prefixes $model.routePrefix) $name $model.routePrefix) -}}
{{- end -}}
{{- $_ := set $prefixes $model.routePrefix $name -}}
{{- end -}}
{{- end -}}

{{/* (list path config) */}}
{{- define "holdfast.validateConfig" -}}
{{- $config := last . -}}
{{- if or (hasKey $config "tenants") (hasKey ($config.redis | default dict) "url") (hasKey ($config.server | default dict) "host") (hasKey ($config.server | default dict) "port") -}}
{{- fail (printf "%s: tenants, redis.url, server.host and server.port are the chart's; see the values tenants, redis and service" (first .)) -}}
{{- end -}}
{{- end -}}

{{/* A name twice would be found only when the application starts. */}}
{{- define "holdfast.validateTenants" -}}
{{- $names := list -}}
{{- range .Values.tenants.list -}}
{{- $names = append $names (.name | default "") -}}
{{- end -}}
{{- if .Values.tenants.firstKey.enabled -}}
{{- $names = append $names .Values.tenants.firstKey.tenant -}}
{{- end -}}
{{- if eq (include "holdfast.makesMetricsKey" .) "true" -}}
{{- $names = append $names "metrics" -}}
{{- end -}}
{{- $there := dict -}}
{{- range $names -}}
{{- if hasKey $there . -}}
{{- fail (printf "tenants: two are named %q; the chart itself makes tenants.firstKey.tenant, and `metrics` for its PodMonitor" .) -}}
{{- end -}}
{{- $_ := set $there . true -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.validateIncremental" -}}
{{- if not .Values.upgrade.gatewayClassName -}}
{{- fail "upgrade.gatewayClassName: incremental upgrades need one" -}}
{{- end -}}
{{- if not (include "holdfast.autoscaling" .) -}}
{{- fail "upgrade: incremental upgrades need a model with autoscaling" -}}
{{- end -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled -}}
{{- fail "upgrade: the operator makes Gateway and HTTPRoute of incremental upgrades itself; turn ingress and httpRoute off" -}}
{{- end -}}
{{- end -}}

{{/* (list name model) */}}
{{- define "holdfast.validateModel" -}}
{{- $name := first . -}}
{{- $model := last . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$" $name) -}}
{{- fail (printf "models: %q is not a name of at most 30 lower-case letters, digits and dashes" $name) -}}
{{- end -}}
{{- if hasSuffix "-routers" $name -}}
{{- fail (printf "models: %q is what the routers of another model would be called" $name) -}}
{{- end -}}
{{- if gt $model.least $model.most -}}
{{- fail (printf "models.%s.autoscaling: minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- if and (eq $model.source.type "hub") (not $model.source.hub.repository) -}}
{{- fail (printf "models.%s.source.hub.repository: name the model" $name) -}}
{{- end -}}
{{- if and (eq $model.source.type "init") (or (not $model.source.init.image) (not $model.source.init.command)) -}}
{{- fail (printf "models.%s.source.init: give image and command" $name) -}}
{{- end -}}
{{- if and (eq $model.source.type "image") (not $model.source.image.reference) -}}
{{- fail (printf "models.%s.source.image.reference: name the image" $name) -}}
{{- end -}}
{{- if and (eq $model.volume.type "hostPath") (not (hasPrefix "/" $model.volume.hostPath)) -}}
{{- fail (printf "models.%s.volume.hostPath: name a folder of the machine" $name) -}}
{{- end -}}
{{- if ne $model.config.engine.device (ternary "cuda" "cpu" (gt (int $model.gpus) 0)) -}}
{{- fail (printf "models.%s: engine.device is %s, and gpus is %d; leave the device to the chart" $name $model.config.engine.device (int $model.gpus)) -}}
{{- end -}}
{{- if and (eq $model.source.type "pvc") (or (ne $model.volume.type "pvc") (not $model.volume.existingClaim)) -}}
{{- fail (printf "models.%s: source pvc needs volume.type pvc and volume.existingClaim" $name) -}}
{{- end -}}
{{- end -}}
