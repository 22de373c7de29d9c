{{/* Charts holdfast and holdfast-sdp have the same file: `cargo xtask charts --write` copies it. */}}

{{/* Begins the name of every object. */}}
{{- define "holdfast.fullname" -}}
{{- .Values.fullnameOverride | default "holdfast" -}}
{{- end }}

{{/* Labels that select the pods of a program. They never change: a DaemonSet's selector cannot. */}}
{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* Labels of pods. They have no version: another version of the chart alone replaces no pod. */}}
{{- define "holdfast.podLabels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/part-of: holdfast
{{- end }}

{{/* Further labels of pods: those of a program win over those of all objects. */}}
{{- define "holdfast.furtherPodLabels" -}}
{{- with merge (dict) .podLabels .root.Values.commonLabels }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of every object of a program. */}}
{{- define "holdfast.labels" -}}
{{ include "holdfast.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Affinity of pods that are on no node of netpol: each of its terms gets one more expression. */}}
{{- define "holdfast.affinity" -}}
{{- $affinity := deepCopy .affinity -}}
{{- $netpol := .root.Values.netpol | default dict -}}
{{- if $netpol.enabled -}}
{{- $label := splitList "=" $netpol.nodeLabel -}}
{{- $other := dict "key" (first $label) "operator" "NotIn" "values" (list (last $label)) -}}
{{- $node := get $affinity "nodeAffinity" | default dict -}}
{{- $required := get $node "requiredDuringSchedulingIgnoredDuringExecution" | default dict -}}
{{- $terms := list -}}
{{- range get $required "nodeSelectorTerms" | default (list (dict)) -}}
{{- $terms = append $terms (set . "matchExpressions" (append (.matchExpressions | default list) $other)) -}}
{{- end -}}
{{- $_ := set $required "nodeSelectorTerms" $terms -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- with $affinity }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* The pods run on a node that no other pod is scheduled to yet. */}}
{{- define "holdfast.startupToleration" -}}
{{- with .Values.agentNotReadyTaintKey }}
- key: {{ . }}
  operator: Exists
{{- end }}
{{- end }}

{{- define "holdfast.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ $tag }}
{{- end -}}
{{- end }}
