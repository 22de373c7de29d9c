{{/* First and last number that new label sets of pods may get. */}}
{{- define "holdfast.identities.first" -}}
{{- splitList "-" .Values.identities.range | first | atoi -}}
{{- end }}
{{- define "holdfast.identities.last" -}}
{{- splitList "-" .Values.identities.range | last | atoi -}}
{{- end }}
