{{/* Accounts of the programs that read the cluster. */}}
{{- define "holdfast.readers" -}}
{{- if .Values.relay.enabled }}
- kind: ServiceAccount
  name: {{ .Values.relay.serviceAccount.name }}
  namespace: {{ .Release.Namespace }}
{{- end }}
{{- if or (not .Values.relay.enabled) .Values.relay.agentsMayRead }}
- kind: ServiceAccount
  name: {{ .Values.agent.serviceAccount.name }}
  namespace: {{ .Release.Namespace }}
{{- end }}
{{- end }}

{{/* Names of these accounts in requests, as a list of CEL. */}}
{{- define "holdfast.readers.usernames" -}}
{{- $names := list -}}
{{- range include "holdfast.readers" . | fromYamlArray -}}
{{- $names = append $names (printf "system:serviceaccount:%s:%s" .namespace .name) -}}
{{- end -}}
{{- toJson $names -}}
{{- end }}
