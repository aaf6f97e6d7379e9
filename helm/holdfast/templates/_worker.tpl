{{/* The pod template of a model's workers: (list $ name model). One pod holds one engine, and perhaps a router. */}}
{{- define "holdfast.workerTemplate" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $worker := $model.worker -}}
{{- $drain := include "holdfast.drainSeconds" (list $root $model) | int -}}
metadata:
  labels:
    {{- include "holdfast.selector" (list $root "worker") | nindent 4 }}
    {{- with $worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $worker.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "holdfast.fullname" $root }}-worker
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $drain 30 }}
  {{- include "holdfast.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- include "holdfast.placement" $worker | nindent 2 }}
  {{- with $worker.topologySpread }}
  topologySpreadConstraints:
    {{- range . }}
    - labelSelector:
        matchLabels:
          {{- include "holdfast.selector" (list $root "worker") | nindent 10 }}
          ray.io/group: {{ $name }}
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with include "holdfast.download" . }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "holdfast.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      ports:
        {{- include "holdfast.ports" $root | nindent 8 }}
      env:
        {{- include "holdfast.env" $root | nindent 8 }}
        {{- with $worker.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- include "holdfast.workerResources" $model | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command: [python, /etc/holdfast/drain/drain.py, "{{ $drain }}"]
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        {{- toYaml $root.Values.probes.liveness | nindent 8 }}
      # Ready when its proxy can take requests, so a worker without any replica never is.
      readinessProbe:
        httpGet: {path: /-/healthz, port: serve}
        {{- toYaml $root.Values.probes.readiness | nindent 8 }}
      volumeMounts:
        {{- include "holdfast.volumeMounts" $root | nindent 8 }}
        - {name: drain, mountPath: /etc/holdfast/drain, readOnly: true}
        {{- if ne $model.source.type "config" }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    {{- include "holdfast.volumes" $root | nindent 4 }}
    {{- include "holdfast.shm" $worker.shmSize | nindent 4 }}
    - name: drain
      configMap:
        name: {{ include "holdfast.fullname" $root }}-drain
    {{- if ne $model.source.type "config" }}
    - name: models
      {{- if eq $model.volume.type "pvc" }}
      persistentVolumeClaim:
        claimName: {{ $model.volume.existingClaim | default (printf "%s-model-%s" (include "holdfast.fullname" $root) $name) }}
        readOnly: {{ eq $model.source.type "pvc" }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $model.volume.size }}
      {{- end }}
    {{- end }}
{{- end -}}

{{/* Requests and limits with the GPU in them. */}}
{{- define "holdfast.workerResources" -}}
{{- $resources := deepCopy .worker.resources -}}
{{- if .gpus -}}
{{- $limits := merge (dict .gpuResource (.gpus | int)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The container that brings the model, where one does: (list $ name model). It can be repeated. */}}
{{- define "holdfast.download" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $source := $model.source -}}
{{- if has $source.type (list "hub" "init") -}}
- name: model
  {{- if eq $source.type "hub" }}
  image: {{ include "holdfast.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ $source.hub.repository }}
    - --local-dir
    - /models/{{ $name }}
    {{- with $source.hub.revision }}
    - --revision
    - {{ . | quote }}
    {{- end }}
    {{- range $source.hub.exclude }}
    - --exclude
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
    {{- with include "holdfast.hubSecret" $root }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $root.Values.hub.key }}}}
    {{- end }}
  {{- else }}
  image: {{ $source.init.image }}
  command:
    {{- toYaml $source.init.command | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    - {name: MODEL_DIR, value: /models/{{ $name }}}
    {{- with $source.init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $source.init.envFromSecrets }}
  envFrom:
    {{- range . }}
    - secretRef: {name: {{ . }}}
    {{- end }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  resources:
    {{- toYaml $model.worker.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end -}}
{{- end -}}
