{{/* What head and workers have in common. */}}

{{/*
Environment of Ray's containers. `cluster/serve_private.py` says the same for one machine.
Trap: HAProxy and the token of KubeRay are settings of the process, so head and workers need them alike.
Which HAProxy is started says the image: the script for it lies there.
*/}}
{{- define "holdfast.env" -}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "60"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ include "holdfast.longestRequest" . | quote }}}
- {name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: "268435456"}
- {name: RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE, value: "1"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DEDUP_LOGS, value: "0"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: HOME, value: /home/holdfast}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/*
Seconds after which a request may be cut that HAProxy had in hand when it was started anew, as it is whenever a router
comes or goes anywhere: the longest that any may take. HAProxy refuses times of more than 2^31 - 1 ms.
*/}}
{{- define "holdfast.longestRequest" -}}
{{- $epoch := toDate "2006-01-02T15:04:05Z07:00" "1970-01-01T00:00:00Z" -}}
{{- $longest := mustDateModify .Values.httpRoute.timeout $epoch | unixEpoch | int | default 86400 -}} {{- /* 0s: no limit */ -}}
{{- range include "holdfast.models" . | fromYaml -}}
{{- $longest = max $longest (include "holdfast.drainSeconds" (list $ .)) -}}
{{- end -}}
{{- min 2147483 $longest -}}
{{- end -}}

{{/* Volumes. The root is read-only: Ray and HAProxy write below /tmp, compilers below the home folder. */}}
{{- define "holdfast.volumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: tenants
  secret:
    secretName: {{ include "holdfast.tenantsSecret" . }}
    items: [{key: tenants.yaml, path: tenants.yaml}]
{{- with include "holdfast.redisSecret" . }}
- name: redis-password
  secret:
    secretName: {{ . }}
    items: [{key: {{ $.Values.redis.auth.key }}, path: password}]
{{- end }}
{{- end -}}

{{- define "holdfast.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/holdfast}
- {name: shm, mountPath: /dev/shm}
- {name: tenants, mountPath: /etc/holdfast/tenants, readOnly: true}
{{- if include "holdfast.redisSecret" . }}
- {name: redis-password, mountPath: /etc/holdfast/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/* The object store's memory. */}}
{{- define "holdfast.shm" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end -}}

{{/* Ports of every Ray pod; all but `serve` are for the cluster, the operator and Prometheus alone. */}}
{{- define "holdfast.ports" -}}
- {name: serve, containerPort: 8000}
- {name: metrics, containerPort: 8080}
- {name: haproxy, containerPort: 9101}
{{- end -}}

{{/*
No GPU, on a machine that has some: a container without this one would see all of them, where the runtime shows what an
image asks for.
*/}}
{{- define "holdfast.noGpu" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end -}}

{{/* Where a pod may run and what it may use: values of a head, worker or router. */}}
{{- define "holdfast.placement" -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
