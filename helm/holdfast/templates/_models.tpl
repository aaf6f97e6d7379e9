{{/* Models: their values with defaults filled in, and the configuration of each. */}}

{{/* YAML of a map: name -> values of the model, and what follows from them. */}}
{{- define "holdfast.models" -}}
{{- $root := . -}}
{{- $models := dict -}}
{{- range $name, $given := .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $root.Values.modelDefaults) (deepCopy ($given | default dict)) -}}
{{- $config := include "holdfast.modelConfig" (list $root $name $model) | fromYaml -}}
{{- $_ := set $model "config" $config -}}
{{- $prefix := ternary "/" (printf "/%s" $name) (eq (len $root.Values.models) 1) -}}
{{- $_ := set $model "routePrefix" ($model.routePrefix | default $prefix) -}}
{{- $count := dig "replicas" "count" 1 $config | int -}}
{{- $scaling := $model.autoscaling -}}
{{- $_ := set $model "least" (ternary ($scaling.minReplicas | int) $count $scaling.enabled) -}}
{{- $_ := set $model "most" (ternary ($scaling.maxReplicas | int) $count $scaling.enabled) -}}
{{- $_ := set $model "initial" (include "holdfast.initialReplicas" (list $root $name $model)) -}}
{{- $_ := set $models $name $model -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{/*
Engines that a new cluster of a scaled model begins with: (list $ name model). Without a value those that the present
clusters have, asked when helm has a cluster to ask; empty: Serve begins with the fewest.
Trap: the operator does not make a new cluster for another number of replicas alone.
*/}}
{{- define "holdfast.initialReplicas" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- if $model.autoscaling.enabled -}}
{{- $now := $model.autoscaling.initialReplicas | default 0 | int -}}
{{- if not $now -}}
{{- range (lookup "ray.io/v1" "RayCluster" $root.Release.Namespace "").items -}}
{{- if eq (dig "labels" "ray.io/originated-from-cr-name" "" .metadata) (include "holdfast.fullname" $root) -}}
{{- range .spec.workerGroupSpecs -}}
{{- if eq .groupName $name -}}
{{- $now = max $now (.replicas | default 0 | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $now -}}
{{- max $model.least (min $model.most $now) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" where any model is scaled. */}}
{{- define "holdfast.autoscaling" -}}
{{- range include "holdfast.models" . | fromYaml -}}
{{- if .autoscaling.enabled }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Folder of a model in its worker: (list name model). Empty: `engine.model` says it. */}}
{{- define "holdfast.modelFolder" -}}
{{- $model := last . -}}
{{- if has $model.source.type (list "pvc" "image") -}}
{{- printf "/models/%s" $model.source.path | trimSuffix "/" -}}
{{- else if ne $model.source.type "config" -}}
/models/{{ first . }}
{{- end -}}
{{- end -}}

{{/* The configuration of `holdfast serve` for one model: (list $ name model). */}}
{{- define "holdfast.modelConfig" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $config := mergeOverwrite (deepCopy $root.Values.config) (deepCopy $model.config) -}}
{{- $engine := $config.engine | default dict -}}
{{- with include "holdfast.modelFolder" (list $name $model) -}}
{{- $engine = merge (dict "model" .) $engine (dict "served_name" (default $name $model.source.hub.repository)) -}}
{{- end -}}
{{- /* Where a GPU is asked for, `auto` would serve from the CPU of a machine whose GPU does not work. */ -}}
{{- if not (hasKey $engine "device") -}}
{{- $engine = merge (dict "device" (ternary "cuda" "cpu" (gt (int $model.gpus) 0))) $engine -}}
{{- end -}}
{{- if and (eq (int $model.gpus) 0) (not (hasKey $engine "threads")) -}}
{{- $engine = merge (dict "threads" (int $model.cpus)) $engine -}}
{{- end -}}
{{- $_ := set $config "engine" $engine -}}
{{- $server := merge (dict "host" "0.0.0.0" "port" 8000) ($config.server | default dict) -}}
{{- if not (hasKey $server "drain_s") -}}
{{- $_ := set $server "drain_s" $root.Values.drainSeconds -}}
{{- end -}}
{{- $_ := set $config "server" $server -}}
{{- $own := dict "namespace" (printf "%s/%s" $root.Release.Namespace $root.Release.Name) -}}
{{- $redis := merge (dict "url" (include "holdfast.redisUrl" $root)) ($config.redis | default dict) $own -}}
{{- $_ := set $config "redis" $redis -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The routers' Redis, without its password, which comes in a file. */}}
{{- define "holdfast.redisUrl" -}}
{{- $address := include "holdfast.redisAddress" . -}}
{{- $user := ternary "" .Values.redis.external.username .Values.redis.enabled -}}
{{- if $user -}}
{{- $address = replace "://" (printf "://%s@" (urlquery $user)) $address -}}
{{- end -}}
{{ $address }}/{{ .Values.redis.database | int }}
{{- end -}}

{{/* Seconds that the pods of a model have to end their requests: (list $ model). */}}
{{- define "holdfast.drainSeconds" -}}
{{- (last .).config.server.drain_s | int -}}
{{- end -}}
