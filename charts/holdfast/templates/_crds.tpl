{{/*
Owner of a CustomResourceDefinition in the cluster:

  release          this release, or none: the definition does not exist
  release "x" of…  another release of Holdfast, such as one that was uninstalled
  foreign          another program, such as Cilium

Without a cluster, as in "helm template", all are the release's.
*/}}
{{- define "holdfast.crdOwner" -}}
{{- $owner := "release" -}}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $release := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- if or (ne $release $.root.Release.Name) (ne $namespace $.root.Release.Namespace) -}}
{{- $partOf := get (.metadata.labels | default dict) "app.kubernetes.io/part-of" -}}
{{- $owner = ternary (printf "release %q of namespace %q" $release $namespace) "foreign" (eq $partOf "holdfast") -}}
{{- end -}}
{{- end -}}
{{- $owner -}}
{{- end }}
