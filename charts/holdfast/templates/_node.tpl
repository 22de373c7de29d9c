{{/* Whether the API server has ValidatingAdmissionPolicies. Without a cluster, as in "helm template", Helm
     has no list of kinds: every version that the chart takes has them. */}}
{{- define "holdfast.admission" -}}
{{- $has := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" -}}
{{- if or $has (not (.Capabilities.APIVersions.Has "apps/v1/DaemonSet")) -}}
true
{{- end -}}
{{- end }}

{{/* Whether agents remove the startup taint of their nodes. Never without the policy that forbids
     every other change. */}}
{{- define "holdfast.removesTaint" -}}
{{- if .Values.agentNotReadyTaintKey -}}
{{- include "holdfast.admission" . -}}
{{- end -}}
{{- end }}
