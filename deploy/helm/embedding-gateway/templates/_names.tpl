{{/* Name of the gateways' objects, and begin of all others. */}}
{{- define "gateway.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "gateway" $name) }}{{ $name = printf "%s-gateway" $name }}{{ end -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Labels of every object. */}}
{{- define "gateway.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: embedding-gateway
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels that select the pods of one part: a list of the root and the part's name. */}}
{{- define "gateway.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}

{{/* Image of this project: a list of the root, the flavour, and its digest or "". A digest is that of one flavour. */}}
{{- define "gateway.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $flavour := index . 1 -}}
{{- $digest := index . 2 | default (ternary $image.digest "" (eq $flavour $image.flavour)) -}}
{{- $suffix := ternary "" (printf "-%s" $flavour) (eq $flavour "cpu") -}}
{{- if $digest -}}
{{ $image.repository }}@{{ $digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}{{ $suffix }}
{{- end -}}
{{- end }}

{{/* The enabled pools with the defaults of their kinds, as YAML. */}}
{{- define "gateway.pools" -}}
{{- $pools := dict -}}
{{- range $name, $given := .Values.pools -}}
{{- if and $given (ne (toString (get $given "enabled")) "false") -}}
{{- $pool := mustMergeOverwrite (deepCopy (index $.Values.poolDefaults $given.kind)) (deepCopy $given) -}}
{{- $_ := set $pool "modelName" ($pool.modelName | default $pool.model) -}}
{{- $_ := set $pool "upstream" ($pool.upstream | default $name) -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end }}

{{/* Items of the secret that a router.yaml refers to as ${file:/secrets/NAME}. */}}
{{- define "gateway.secretItems" -}}
{{- range regexFindAll "\\$\\{file:/secrets/[A-Za-z0-9._-]+" . -1 | uniq | sortAlpha }}
- {key: {{ . | trimPrefix "${file:/secrets/" }}, path: {{ . | trimPrefix "${file:/secrets/" }}}
{{- end }}
{{- end }}

{{/* Time for lame duck and drain, rounded up, and for the end of the processes: 15 s and a reserve. */}}
{{- define "gateway.endingSeconds" -}}
{{- $router := fromYaml . -}}
{{- add (int (ceil (addf (float64 ($router.drain_s | default 15)) (float64 ($router.lame_duck_s | default 0))))) 20 -}}
{{- end }}

{{- define "gateway.hostSpread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "gateway.selector" . | nindent 6 }}
{{- end }}

{{/* Placement of the pods of a pool or of the gateways. */}}
{{- define "gateway.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
