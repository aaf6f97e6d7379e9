{{/* The pod template of the head: Ray's control plane, no engine and no router. */}}
{{- define "holdfast.headTemplate" -}}
metadata:
  labels:
    {{- include "holdfast.selector" (list . "head") | nindent 4 }}
    {{- with .Values.head.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.head.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "holdfast.fullname" . }}-head
  # The autoscaler, a container of this pod, asks Kubernetes for workers; nobody else asks it for anything.
  automountServiceAccountToken: {{ eq (include "holdfast.autoscaling" . | trunc 4) "true" }}
  terminationGracePeriodSeconds: 60
  {{- include "holdfast.pullSecrets" . | nindent 2 }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- include "holdfast.placement" .Values.head | nindent 2 }}
  {{- with .Values.head.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-head
      image: {{ include "holdfast.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      ports:
        {{- include "holdfast.ports" . | nindent 8 }}
        - {name: dashboard, containerPort: 8265}
      env:
        {{- include "holdfast.env" . | nindent 8 }}
        {{- include "holdfast.noGpu" . | nindent 8 }}
        {{- with .Values.head.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml .Values.head.resources | nindent 8 }}
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      readinessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      volumeMounts:
        {{- include "holdfast.volumeMounts" . | nindent 8 }}
        {{- with .Values.head.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .Values.head.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "holdfast.volumes" . | nindent 4 }}
    {{- include "holdfast.shm" .Values.head.shmSize | nindent 4 }}
    {{- with .Values.head.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
