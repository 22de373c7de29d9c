{{/*
Pod template of the DaemonSet of holdfast-sdp. Charts holdfast and holdfast-sdp have the same file:
`cargo xtask charts --write` copies it from holdfast.

  root        the top-level context
  sdp         values of the proxy
  config      name of the ConfigMap for --config-dir
  checksum    checksum of the settings; empty: none
  args        arguments of the caller
  stateDir    directory of the agent on the node
  metrics     HOST:PORT of the metrics, or empty

The pod declares no port. With hostNetwork, each containerPort is a hostPort of the pod, and a new
pod would stay Pending beside the one that it replaces.
*/}}
{{- define "holdfast.sdpPod" -}}
{{- $sdp := .sdp -}}
metadata:
  labels:
    {{- include "holdfast.podLabels" (dict "name" "holdfast-sdp" "root" .root) | nindent 4 }}
    {{- with include "holdfast.furtherPodLabels" (dict "podLabels" $sdp.podLabels "root" .root) }}
    {{- . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: holdfast-sdp
    {{- with .checksum }}
    holdfast/config-checksum: {{ . }}
    {{- end }}
    {{- with $sdp.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  hostNetwork: true
  dnsPolicy: Default
  serviceAccountName: {{ $sdp.serviceAccount.name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  priorityClassName: {{ $sdp.priorityClassName }}
  terminationGracePeriodSeconds: {{ $sdp.terminationGracePeriodSeconds }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $sdp.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "holdfast.affinity" (dict "affinity" $sdp.affinity "root" .root) }}
  affinity:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with concat (include "holdfast.startupToleration" .root | fromYamlArray) $sdp.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $sdp.hostAliases }}
  hostAliases:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    seccompProfile:
      {{- toYaml $sdp.seccompProfile | nindent 6 }}
    appArmorProfile:
      {{- toYaml $sdp.appArmorProfile | nindent 6 }}
  containers:
    - name: holdfast-sdp
      image: {{ include "holdfast.image" (dict "image" $sdp.image "root" .root) | quote }}
      imagePullPolicy: {{ $sdp.image.pullPolicy }}
      args:
        - --config-dir=/etc/holdfast/config
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
        {{- with .metrics }}
        - {{ printf "--metrics-address=%s" . | quote }}
        {{- end }}
        {{- range $sdp.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        # Names the instance's own socket. The probes find it by this name.
        - name: HOLDFAST_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- with $sdp.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      # Not over HTTP: both pods of an update share the port.
      readinessProbe:
        exec:
          command: [holdfast-sdp, ready]
        periodSeconds: 5
        timeoutSeconds: 7
        failureThreshold: 2
      livenessProbe:
        exec:
          command: [holdfast-sdp, alive]
        initialDelaySeconds: 10
        periodSeconds: 10
        timeoutSeconds: 7
        failureThreshold: 6
      securityContext:
        privileged: false
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        runAsUser: 0
        runAsGroup: 0
        capabilities:
          drop: [ALL]
          add:
            {{- toYaml $sdp.capabilities | nindent 12 }}
      {{- with $sdp.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - name: config
          mountPath: /etc/holdfast/config
          readOnly: true
        - name: bpf
          mountPath: /sys/fs/bpf
          mountPropagation: HostToContainer
        - name: state
          mountPath: {{ .stateDir }}
          mountPropagation: HostToContainer
          readOnly: true
        - name: sockets
          mountPath: /run/holdfast/sdp
        - name: journal
          mountPath: /var/lib/holdfast/sdp
        {{- with $sdp.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ .config }}
    - name: bpf
      hostPath:
        path: /sys/fs/bpf
        type: DirectoryOrCreate
    - name: state
      hostPath:
        path: {{ .stateDir }}
        type: DirectoryOrCreate
    - name: sockets
      hostPath:
        path: /run/holdfast/sdp
        type: DirectoryOrCreate
    - name: journal
      hostPath:
        path: /var/lib/holdfast/sdp
        type: DirectoryOrCreate
    {{- with $sdp.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
