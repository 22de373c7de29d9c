{{/* ServiceAccount of the programs that read the cluster. */}}
{{- define "holdfast.reader" -}}
{{- if .Values.relay.enabled -}}
{{ .Values.relay.serviceAccount.name }}
{{- else -}}
{{ .Values.agent.serviceAccount.name }}
{{- end -}}
{{- end }}
