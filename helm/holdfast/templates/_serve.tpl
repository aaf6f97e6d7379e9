{{/* serveConfigV2: an application for each model. It is what `serve deploy` takes. */}}
{{- define "holdfast.serveConfig" -}}
{{- $root := . -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  encoding: JSON
  log_level: {{ .Values.logLevel }}
  enable_access_log: false
applications:
{{- range $name, $model := include "holdfast.models" . | fromYaml }}
  - name: {{ $name }}
    route_prefix: {{ $model.routePrefix }}
    import_path: holdfast.cluster.serve_config:application
    # Trap: Serve replaces every replica when anything in here changes.
    args:
      config:
        {{- toYaml $model.config | nindent 8 }}
      tenants_file: /etc/holdfast/tenants/tenants.yaml
      {{- with include "holdfast.redisSecret" $root }}
      redis_password_file: /etc/holdfast/redis/password
      {{- end }}
    deployments:
      - name: replicas
        {{- if $model.autoscaling.enabled }}
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ $model.least }}
          max_replicas: {{ $model.most }}
          {{- with $model.initial }}
          initial_replicas: {{ . }}
          {{- end }}
          policy:
            policy_function: holdfast.cluster.autoscaling:Demand
            policy_kwargs:
              ongoing_requests: {{ $model.autoscaling.targets.ongoingRequests }}
              waiting_tokens: {{ $model.autoscaling.targets.waitingTokens | int64 }}
              cell_pressure: {{ $model.autoscaling.targets.cellPressure }}
              pinned_programs: {{ $model.autoscaling.targets.pinnedPrograms }}
          upscale_delay_s: {{ $model.autoscaling.upscaleDelaySeconds }}
          downscale_delay_s: {{ $model.autoscaling.downscaleDelaySeconds }}
        {{- else }}
        num_replicas: {{ $model.least }}
        {{- end }}
        ray_actor_options:
          {{- if $model.gpus }}
          num_cpus: 0
          num_gpus: {{ $model.gpus }}
          {{- else }}
          num_cpus: {{ $model.cpus }}
          {{- end }}
          resources: {{ dict (include "holdfast.placeName" $name) 0.001 | toJson }}
      - name: router
        num_replicas: {{ $model.routers }}
        ray_actor_options:
          num_cpus: 0
          # All that a router's pod has: one a pod.
          resources: {{ dict (include "holdfast.routerPlaceName" $name) 1 | toJson }}
{{- end }}
{{- end -}}

{{/* Ray's resource that only the pods with a model's engines have, and the one that those with its routers have. */}}
{{- define "holdfast.placeName" -}}
model_{{ . | replace "-" "_" }}
{{- end -}}

{{- define "holdfast.routerPlaceName" -}}
router_{{ . | replace "-" "_" }}
{{- end -}}
