{{/* Settings that both programs read. The proxies are replaced when they change. */}}
{{- define "holdfast.config.shared" -}}
enable-ipv4: {{ .Values.ipv4.enabled | quote }}
enable-ipv6: {{ .Values.ipv6.enabled | quote }}
state-dir: /run/holdfast
tofqdns-proxy-port: {{ .Values.dnsProxy.port | quote }}
tofqdns-min-ttl: {{ .Values.dnsProxy.minTTL | quote }}
tofqdns-proxy-response-max-delay: {{ .Values.dnsProxy.responseMaxDelay | quote }}
tofqdns-dns-reject-response-code: {{ .Values.dnsProxy.rejectResponseCode | quote }}
dnsproxy-enable-transparent-mode: {{ .Values.dnsProxy.transparentMode | quote }}
{{- end }}

{{- define "holdfast.config.agent" -}}
cluster-name: {{ .Values.cluster.name | quote }}
{{- with .Values.cluster.labels }}
labels: {{ join " " . | quote }}
{{- end }}
{{- with .Values.cluster.podCIDRs }}
pod-cidr: {{ join "," . | quote }}
{{- end }}
{{- with .Values.cluster.serviceCIDRs }}
k8s-service-cidr: {{ join "," . | quote }}
{{- end }}
{{- with .Values.cluster.dnsAliases }}
k8s-dns-alias: {{ join "," . | quote }}
{{- end }}
{{- with .Values.cluster.dnsService }}
dns-service: {{ . | quote }}
{{- end }}
{{- with .Values.cluster.dnsServers }}
dns-server: {{ printf "cluster,%s" (join "," .) | quote }}
{{- end }}
tofqdns-servers: {{ .Values.dnsProxy.nameServers | quote }}
{{- with .Values.k8s.apiServer }}
k8s-api-server: {{ . | quote }}
{{- end }}
agent-not-ready-taint-key: {{ .Values.agentNotReadyTaintKey | quote }}
enable-policy: {{ .Values.enablePolicy | quote }}
policy-deny-response: {{ .Values.policyDenyResponse | quote }}
dns-deny-response: {{ .Values.dnsDenyResponse | quote }}
disable-builtin-dns-proxy: {{ .Values.disableBuiltinDnsProxy | quote }}
identity-restore-grace-period: {{ .Values.agent.identityRestoreGracePeriod | quote }}
bpf-policy-map-max: {{ int64 .Values.agent.maps.policy | quote }}
bpf-ipcache-map-max: {{ int64 .Values.agent.maps.ipcache | quote }}
{{- if eq .Values.cni.mode "chained" }}
cni-socket: /run/holdfast/cni.sock
cni-conf-dir: {{ .Values.cni.confDir | quote }}
cni-bin-dir: {{ .Values.cni.binDir | quote }}
{{- end }}
{{- if eq .Values.identities.mode "cluster" }}
identity-allocation: cluster
identity-range: {{ .Values.identities.range | quote }}
{{- end }}
{{- with .Values.highScale }}
{{- if .mode }}
high-scale-ipcache: {{ .mode | quote }}
tunnel-port: {{ .port | quote }}
{{- with .devices }}
high-scale-device: {{ join "," . | quote }}
{{- end }}
{{- if .prune }}
high-scale-prune: "true"
high-scale-keep: {{ join ";" .keep | quote }}
{{- end }}
{{- if .force }}
high-scale-force: "true"
{{- end }}
{{- end }}
{{- end }}
{{- if ne .Values.resolver.mode "off" }}
resolver: {{ .Values.resolver.mode | quote }}
resolver-namespace: {{ include "holdfast.resolver.namespace" . | quote }}
{{- end }}
{{- end }}

{{- define "holdfast.config.sdp" -}}
dnsproxy-concurrency-limit: {{ int64 .Values.sdp.concurrencyLimit | quote }}
drain-timeout: {{ .Values.sdp.drainTimeout | quote }}
log-level: {{ .Values.sdp.logLevel | quote }}
log-format: {{ .Values.sdp.logFormat | quote }}
query-log: {{ .Values.sdp.queryLog | quote }}
{{- end }}

{{/* All settings, with those of config.extra last. */}}
{{- define "holdfast.config" -}}
{{- $shared := include "holdfast.config.shared" . | fromYaml -}}
{{- $agent := include "holdfast.config.agent" . | fromYaml -}}
{{- $sdp := include "holdfast.config.sdp" . | fromYaml -}}
{{- $extra := dict -}}
{{- range $key, $value := .Values.config.extra -}}
{{- $_ := set $extra $key (toString $value) -}}
{{- end -}}
{{- mergeOverwrite $shared $agent $sdp $extra | toYaml -}}
{{- end }}

{{/* Checksum of the settings that a program reads: only a change of them replaces its pods. */}}
{{- define "holdfast.config.checksum" -}}
{{- $own := include (printf "holdfast.config.%s" .program) .root -}}
{{- $shared := include "holdfast.config.shared" .root -}}
{{- printf "%s\n%s\n%s" $shared $own (toYaml .root.Values.config.extra) | sha256sum -}}
{{- end }}

{{/* Namespace of the DNSNameResolvers. */}}
{{- define "holdfast.resolver.namespace" -}}
{{- $own := ternary "openshift-ovn-kubernetes" .Release.Namespace (eq .Values.resolver.mode "consume") -}}
{{- .Values.resolver.namespace | default $own -}}
{{- end }}
