{{/*
Rules as a file has them, with the numbers that values give in place of an alert's own: (list values text). Every
expression of an alert ends with its threshold.
*/}}
{{- define "holdfast.rules" -}}
{{- $values := first . -}}
{{- $rules := last . | replace "docs/runbook.md" $values.runbook | fromYaml -}}
{{- range $group := $rules.groups -}}
{{- range $rule := $group.rules -}}
{{- $own := get $values.alerts ($rule.alert | default "") | default dict -}}
{{- if hasKey $own "threshold" -}}
{{- $_ := set $rule "expr" (regexReplaceAll "[-0-9.e]+$" $rule.expr ($own.threshold | toString)) -}}
{{- end -}}
{{- if hasKey $own "for" -}}
{{- $_ := set $rule "for" $own.for -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}
