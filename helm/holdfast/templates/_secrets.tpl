{{/* What the chart's own Secrets hold. A value that was made at random is read again from the cluster. */}}

{{/* (list $ secret key given): the value in clear. */}}
{{- define "holdfast.kept" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $key := index . 2 -}}
{{- $old := lookup "v1" "Secret" $root.Release.Namespace $name -}}
{{- if index . 3 -}}
{{- index . 3 -}}
{{- else if and $old (hasKey ($old.data | default dict) $key) -}}
{{- index $old.data $key | b64dec -}}
{{- else -}}
{{- randAlphaNum 40 -}}
{{- end -}}
{{- end -}}

{{/* The key of a tenant that the chart makes, in a Secret of that name: (list $ secret key given). Several templates
     need the same one, so it is made once in a rendering. */}}
{{- define "holdfast.madeKey" -}}
{{- $root := index . 0 -}}
{{- $secret := index . 1 -}}
{{- $made := $root.Values.tenants.made | default dict -}}
{{- if not (hasKey $made $secret) -}}
{{- $_ := set $made $secret (include "holdfast.kept" (list $root $secret (index . 2) (index . 3))) -}}
{{- $_ := set $root.Values.tenants "made" $made -}}
{{- end -}}
{{- get $made $secret -}}
{{- end -}}

{{- define "holdfast.firstKey" -}}
{{- include "holdfast.madeKey" (list . (include "holdfast.apiKeySecret" .) "api-key" .Values.tenants.firstKey.key) -}}
{{- end -}}

{{- define "holdfast.metricsKey" -}}
{{- $apiKey := .Values.monitoring.podMonitor.apiKey -}}
{{- include "holdfast.madeKey" (list . (include "holdfast.metricsKeySecret" .) $apiKey.secretKey $apiKey.key) -}}
{{- end -}}

{{/* "true" where the chart makes a tenant that reads the metrics. */}}
{{- define "holdfast.makesMetricsKey" -}}
{{- $monitor := .Values.monitoring.podMonitor -}}
{{- and $monitor.enabled (not $monitor.apiKey.existingSecret) (not .Values.tenants.existingSecret) -}}
{{- end -}}

{{/* A tenant of the configuration: (list name key more). */}}
{{- define "holdfast.tenant" -}}
{{- $hash := printf "sha256:%s" (index . 1 | sha256sum) -}}
{{- merge (dict "name" (index . 0) "key_hashes" (list $hash)) (index . 2) | toYaml -}}
{{- end -}}

{{/* The `tenants` of the configuration. */}}
{{- define "holdfast.tenants" -}}
{{- $tenants := .Values.tenants.list -}}
{{- if .Values.tenants.firstKey.enabled -}}
{{- $name := .Values.tenants.firstKey.tenant -}}
{{- $tenants = append $tenants (include "holdfast.tenant" (list $name (include "holdfast.firstKey" .) dict) | fromYaml) -}}
{{- end -}}
{{- if eq (include "holdfast.makesMetricsKey" .) "true" -}}
{{- $more := dict "operator" true "limits" (dict "requests_per_minute" 1) -}}
{{- $tenants = append $tenants (include "holdfast.tenant" (list "metrics" (include "holdfast.metricsKey" .) $more) | fromYaml) -}}
{{- end -}}
tenants:
  {{- toYaml $tenants | nindent 2 }}
{{- end -}}
