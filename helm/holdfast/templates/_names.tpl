{{/* Names and labels. */}}

{{- define "holdfast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 35 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay adds up to 28 characters to the name of a RayService. */}}
{{- define "holdfast.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- else if contains (include "holdfast.name" .) .Release.Name -}}
{{- .Release.Name | trunc 35 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "holdfast.name" .) | trunc 35 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of an object: (list $ component). */}}
{{- define "holdfast.labels" -}}
{{- $root := first . -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "holdfast.name" $root }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{ include "holdfast.selector" . }}
{{- end -}}

{{/*
What pods are selected by: (list $ component).
Trap: `app.kubernetes.io/name` is not among them. The operator's Service of the head selects its own value of it, so on
Ray's pods that label must stay as the operator sets it.
*/}}
{{- define "holdfast.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/part-of: {{ include "holdfast.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- with last . }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Ray's pods, as a label selector. */}}
{{- define "holdfast.clusterSelector" -}}
matchLabels:
  {{- include "holdfast.selector" (list . "") | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, router, worker]}
{{- end -}}

{{- define "holdfast.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion $image.variant) }}
{{- end -}}
{{- end -}}

{{- define "holdfast.redisImage" -}}
{{- $image := .Values.redis.image -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag }}{{ end }}
{{- end -}}

{{- define "holdfast.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where a Secret is, the user's or ours: each gives a name. */}}

{{- define "holdfast.tenantsSecret" -}}
{{- .Values.tenants.existingSecret | default (printf "%s-tenants" (include "holdfast.fullname" .)) -}}
{{- end -}}

{{- define "holdfast.apiKeySecret" -}}
{{- include "holdfast.fullname" . }}-api-key
{{- end -}}

{{- define "holdfast.metricsKeySecret" -}}
{{- .Values.monitoring.podMonitor.apiKey.existingSecret | default (printf "%s-metrics-key" (include "holdfast.fullname" .)) -}}
{{- end -}}

{{/* Empty where there is no password. */}}
{{- define "holdfast.redisSecret" -}}
{{- $auth := .Values.redis.auth -}}
{{- if $auth.existingSecret -}}
{{- $auth.existingSecret -}}
{{- else if or .Values.redis.enabled $auth.password -}}
{{- include "holdfast.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{/* Empty where there is no token. */}}
{{- define "holdfast.hubSecret" -}}
{{- if .Values.hub.existingSecret -}}
{{- .Values.hub.existingSecret -}}
{{- else if .Values.hub.token -}}
{{- include "holdfast.fullname" . }}-hub
{{- end -}}
{{- end -}}

{{- define "holdfast.redisAddress" -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "holdfast.fullname" . }}-redis:6379
{{- else -}}
{{- .Values.redis.external.address -}}
{{- end -}}
{{- end -}}
