{{/*
The pod template of a model's workers: (list $ name model kind). A pod of kind `worker` holds one engine, one of kind
`router` a router; the values of either are the model's of that name.
*/}}
{{- define "holdfast.workerTemplate" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $kind := index . 3 -}}
{{- $pod := get $model $kind -}}
{{- $engine := eq $kind "worker" -}}
{{- $brought := and $engine (ne $model.source.type "config") -}}
{{- $drain := include "holdfast.drainSeconds" (list $root $model) | int -}}
metadata:
  labels:
    {{- include "holdfast.selector" (list $root $kind) | nindent 4 }}
    {{- with $pod.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pod.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "holdfast.fullname" $root }}-{{ $kind }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $drain 30 }}
  {{- include "holdfast.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- include "holdfast.placement" $pod | nindent 2 }}
  {{- with $pod.topologySpread }}
  topologySpreadConstraints:
    {{- range . }}
    # A cluster that takes over from another is spread by itself.
    - matchLabelKeys: [ray.io/cluster]
      labelSelector:
        matchLabels:
          {{- include "holdfast.selector" (list $root $kind) | nindent 10 }}
          ray.io/group: {{ include "holdfast.groupName" (list $name $kind) }}
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- $download := ternary (include "holdfast.download" (list $root $name $model)) "" $engine }}
  {{- if or $download $pod.initContainers }}
  initContainers:
    {{- with $pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $download }}
    {{- . | nindent 4 }}
    {{- end }}
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
        {{- if not (and $engine $model.gpus) }}
        {{- include "holdfast.noGpu" $root | nindent 8 }}
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- if $engine }}
        {{- include "holdfast.engineResources" $model | nindent 8 }}
        {{- else }}
        {{- toYaml $pod.resources | nindent 8 }}
        {{- end }}
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
        {{- if $brought }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pod.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "holdfast.volumes" $root | nindent 4 }}
    {{- include "holdfast.shm" $pod.shmSize | nindent 4 }}
    - name: drain
      configMap:
        name: {{ include "holdfast.fullname" $root }}-drain
    {{- if $brought }}
    {{- include "holdfast.modelVolume" (list $root $name $model) | nindent 4 }}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The group of worker pods: (list name kind). */}}
{{- define "holdfast.groupName" -}}
{{- first . }}{{ if eq (last .) "router" }}-routers{{ end }}
{{- end -}}

{{/* What holds the model's files: (list $ name model). */}}
{{- define "holdfast.modelVolume" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
- name: models
  {{- if eq $model.source.type "image" }}
  image:
    reference: {{ $model.source.image.reference }}
    pullPolicy: {{ $model.source.image.pullPolicy }}
  {{- else if eq $model.volume.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $model.volume.existingClaim | default (printf "%s-model-%s" (include "holdfast.fullname" $root) $name) }}
    readOnly: {{ eq $model.source.type "pvc" }}
  {{- else if eq $model.volume.type "hostPath" }}
  hostPath:
    path: {{ $model.volume.hostPath }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ $model.volume.size }}
  {{- end }}
{{- end -}}

{{/* Requests and limits of a pod with an engine, with the GPU in them. */}}
{{- define "holdfast.engineResources" -}}
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
    {{- include "holdfast.noGpu" $root | nindent 4 }}
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
    {{- include "holdfast.noGpu" $root | nindent 4 }}
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
