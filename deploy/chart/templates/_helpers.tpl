{{/* Labels of all objects. */}}
{{- define "kplane.labels" -}}
app.kubernetes.io/name: kplane
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{/* Labels by which pods are selected; (dict "root" $ "component" NAME). */}}
{{- define "kplane.selector" -}}
app.kubernetes.io/name: kplane
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The full name of an image; (dict "root" $ "image" VALUES "suffix" TEXT). */}}
{{- define "kplane.image" -}}
{{- $name := printf "%s/%s" .root.Values.image.registry .image.repository -}}
{{- if .image.digest -}}
{{ $name }}@{{ .image.digest }}
{{- else -}}
{{ $name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ .suffix }}
{{- end -}}
{{- end -}}

{{/* The name that the control plane's certificate has. */}}
{{- define "kplane.serverName" -}}
kplane-controlplane.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The text of kube-proxy's file, where the chart knows it. */}}
{{- define "kplane.kubeProxyConfig" -}}
{{- with .Values.agent.kubeProxyConfig -}}
{{- if .inline -}}
{{ .inline }}
{{- else if .copyFrom.name -}}
{{- $found := lookup "v1" "ConfigMap" .copyFrom.namespace .copyFrom.name -}}
{{- $key := .copyFrom.key -}}
{{- if not $found -}}
{{- /* It may go with kube-proxy. The copy of the last installation has the same text. */ -}}
{{- $found = lookup "v1" "ConfigMap" $.Release.Namespace "kplane-kube-proxy-config" -}}
{{- $key = "config.conf" -}}
{{- end -}}
{{- $place := printf "ConfigMap %s/%s" .copyFrom.namespace .copyFrom.name -}}
{{- if not $found -}}
{{- fail (printf "agent.kubeProxyConfig.copyFrom: there is no %s, or Helm may not read the cluster (helm template): give the text as agent.kubeProxyConfig.inline" $place) -}}
{{- end -}}
{{- $text := required (printf "agent.kubeProxyConfig.copyFrom: %s has no key %s" $place $key) (index $found.data $key) -}}
{{- $kept := include "kplane.keptMode" $ -}}
{{- if $kept -}}
{{ set (fromYaml $text) "mode" $kept | toYaml }}
{{- else -}}
{{ $text }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The mode that agents keep although the file to copy names another one by now; empty = the file's. kubeadm 1.37 writes
     "mode: iptables" where nobody has chosen a mode, and an upgrade must not take agents to another backend for that. */}}
{{- define "kplane.keptMode" -}}
{{- $from := .Values.agent.kubeProxyConfig.copyFrom -}}
{{- if and $from.name (not .Values.agent.backend) -}}
{{- $before := lookup "v1" "ConfigMap" .Release.Namespace "kplane-kube-proxy-config" -}}
{{- $found := lookup "v1" "ConfigMap" $from.namespace $from.name -}}
{{- if and $before $found -}}
{{- $old := index $before.data "config.conf" | default "" | fromYaml -}}
{{- $new := index $found.data $from.key | default "" | fromYaml -}}
{{- $mode := $old.mode | default "nftables" -}}
{{- if not (or $old.Error $new.Error (eq $mode ($new.mode | default "nftables"))) -}}
{{ $mode }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name of the ConfigMap with kube-proxy's file, if there is one. */}}
{{- define "kplane.kubeProxyConfigMap" -}}
{{- with .Values.agent.kubeProxyConfig -}}
{{- $ways := list .inline .existingConfigMap .copyFrom.name | compact -}}
{{- if gt (len $ways) 1 -}}
{{- fail "agent.kubeProxyConfig: give one of inline, existingConfigMap and copyFrom.name" -}}
{{- end -}}
{{- if .existingConfigMap -}}
{{ .existingConfigMap }}
{{- else if $ways -}}
kplane-kube-proxy-config
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The address of the agent's metrics, where the chart knows it. */}}
{{- define "kplane.agentMetrics" -}}
{{- if include "kplane.kubeProxyConfigMap" . -}}
{{- if .Values.agent.kubeProxyConfig.existingConfigMap -}}
unknown:10249
{{- else -}}
{{- $config := include "kplane.kubeProxyConfig" . | fromYaml | default dict -}}
{{- $config.metricsBindAddress | default "127.0.0.1:10249" -}}
{{- end -}}
{{- else -}}
{{ .Values.agent.metricsBindAddress }}
{{- end -}}
{{- end -}}

{{/* The agent's mode, where the chart knows it. */}}
{{- define "kplane.mode" -}}
{{- if .Values.agent.backend -}}
{{ .Values.agent.backend }}
{{- else if .Values.agent.kubeProxyConfig.existingConfigMap -}}
unknown
{{- else -}}
{{- $text := include "kplane.kubeProxyConfig" . -}}
{{- $config := fromYaml $text | default dict -}}
{{- $config.mode | default "nftables" -}}
{{- end -}}
{{- end -}}

{{/* Whether nodes may have rules of iptables, from kube-proxy or from agents with iptables; empty = no sign of that. */}}
{{- define "kplane.oldRules" -}}
{{- $agents := lookup "apps/v1" "DaemonSet" .Release.Namespace "kplane-nodeagent" | default dict -}}
{{- $agent := dig "spec" "template" "spec" "containers" (list dict) $agents | first -}}
{{- $hadIptables := has "NET_RAW" (dig "securityContext" "capabilities" "add" list $agent) -}}
{{- if or $hadIptables (lookup "apps/v1" "DaemonSet" "kube-system" "kube-proxy") -}}yes{{- end -}}
{{- end -}}

{{/* Whether the agent's image has iptables; empty = it has not. */}}
{{- define "kplane.withIptables" -}}
{{- if eq .Values.agent.variant "auto" -}}
{{- if or .Values.migration.enabled (ne (include "kplane.mode" .) "nftables") (include "kplane.oldRules" .) -}}yes{{- end -}}
{{- else if eq .Values.agent.variant "iptables" -}}
yes
{{- end -}}
{{- end -}}
