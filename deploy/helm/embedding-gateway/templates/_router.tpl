{{/* router.yaml of the gateways: the text of `routerYaml`, or `config` over what follows from the other values. */}}
{{- define "gateway.router" -}}
{{- if .Values.routerYaml -}}
{{- include "gateway.checkListeners" (dict "name" "routerYaml" "router" (fromYaml .Values.routerYaml)) -}}
{{- .Values.routerYaml -}}
{{- else -}}
{{- $fullname := include "gateway.fullname" . -}}
{{- $pools := include "gateway.pools" . | fromYaml -}}
{{- $upstreams := dict -}}
{{- $models := dict -}}
{{- $defaults := dict -}}
{{- range $name, $pool := $pools -}}
{{- $url := printf "http://%s-%s:8080" $fullname $name -}}
{{/* Every pod behind the headless name is a replica. Requests wait while pods are replaced or started from zero. */}}
{{- $upstream := dict "backend" "tei" "replicas" (list $url) "discover" "dns" "when_unavailable" "wait" "api_key" "${file:/secrets/upstream-key}" -}}
{{- $_ := set $upstreams $pool.upstream (mustMergeOverwrite $upstream (deepCopy ($pool.upstreamConfig | default dict))) -}}
{{- $_ := set $models $pool.modelName (mustMergeOverwrite (dict "upstream" $pool.upstream) (deepCopy ($pool.modelConfig | default dict))) -}}
{{- range $pool.defaultFor }}{{ $_ := set $defaults . $pool.modelName }}{{ end -}}
{{- end -}}
{{- $admin := dict "listen" "0.0.0.0:8081" "keys" (list (include "gateway.metricsKey" . | fromYaml) (dict "digest" "${file:/secrets/admin-key-digest}" "id" "operators")) -}}
{{/* The pod serves on while the cluster stops sending requests to it. */}}
{{- $router := dict "listen" "0.0.0.0:8080" "lame_duck_s" 10 "drain_s" 30 "admin" $admin "upstreams" $upstreams "models" $models -}}
{{- if $defaults }}{{ $_ := set $router "defaults" $defaults }}{{ end -}}
{{- $store := .Values.redis.url -}}
{{- if .Values.redis.enabled }}{{ $store = printf "redis://:${file:/secrets/redis-password}@%s-redis:6379/0" $fullname }}{{ end -}}
{{- if $store -}}
{{/* The number of gateways is used until Redis reports it. */}}
{{- $gateways := ternary .Values.autoscaling.minReplicas .Values.replicas .Values.autoscaling.enabled -}}
{{- $_ := set $router "quotas" (dict "store" $store "gateways" $gateways) -}}
{{- end -}}
{{- if .Values.tls.secretName }}{{ $_ := set $router "tls" (dict "certificate" "/tls/tls.crt" "private_key" "/tls/tls.key") }}{{ end -}}
{{- $router = mustMergeOverwrite $router (deepCopy .Values.config) -}}
{{- include "gateway.checkListeners" (dict "name" "config" "router" $router) -}}
{{- if not $router.models }}{{ fail "no model is served: enable one of `pools`, or name upstreams and models in `config` or `routerYaml`" }}{{ end -}}
{{- if not (dig "quotas" "store" "" $router) }}{{ fail "no store for quotas and keys: enable `redis`, set `redis.url`, or say `config.quotas.store: memory` for one gateway without any" }}{{ end -}}
{{- toYaml $router -}}
{{- end -}}
{{- end }}

{{/* Refuse a router.yaml whose ports are not those of the containers, which would never become ready. */}}
{{- define "gateway.checkListeners" -}}
{{- with .router.Error }}{{ fail (printf "%s is no YAML: %s" $.name .) }}{{ end -}}
{{- $admin := dig "admin" "listen" "" .router -}}
{{- if or (ne (toString .router.listen) "0.0.0.0:8080") (ne (toString $admin) "0.0.0.0:8081") }}{{ fail (printf "%s: `listen` has to be 0.0.0.0:8080 and `admin.listen` 0.0.0.0:8081, the ports of the containers" .name) }}{{ end -}}
{{- end }}

{{/*
Ports of a router.yaml besides those of `listen` and `admin.listen`, as YAML: `callers` need a key, and those at `keyless`
do not. A loopback address is only for containers of the pod.
*/}}
{{- define "gateway.ports" -}}
{{- $router := fromYaml . -}}
{{- $callers := list -}}
{{- with $router.grpc }}{{ $callers = append $callers (dict "name" "grpc" "port" (regexFind "[0-9]+$" .listen | int)) }}{{ end -}}
{{- $keyless := list -}}
{{- range $index, $listener := $router.listeners -}}
{{- if not (regexMatch "^(127\\.|\\[::1\\]|localhost:)" $listener.address) -}}
{{- $keyless = append $keyless (dict "name" (printf "keyless-%d" $index) "port" (regexFind "[0-9]+$" $listener.address | int)) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "callers" $callers "keyless" $keyless) -}}
{{- end }}

{{/* router.yaml of an engine's pods: a list of the root and the pool. Only gateways call them. */}}
{{- define "gateway.engineRouter" -}}
{{- $pool := index . 1 -}}
{{/* The upstream's name differs from the gateways', so that scalers and dashboards can tell the two lanes apart. */}}
{{- $name := printf "engine%s" (ternary "-pod" "" (eq $pool.upstream "engine")) -}}
{{- $upstream := mustMergeOverwrite (dict "backend" "torch" "model" $pool.model) (deepCopy ($pool.engineConfig | default dict)) -}}
{{- $admin := dict "listen" "0.0.0.0:8081" "keys" (list (include "gateway.metricsKey" (index . 0) | fromYaml)) -}}
{{- $defaults := dict "embed" $pool.modelName "rerank" $pool.modelName -}}
{{/* DNS caches may keep the old address for 30 s, and gateways look it up every 5 s. */}}
{{- toYaml (dict "listen" "0.0.0.0:8080" "lame_duck_s" 40 "drain_s" 30 "admin" $admin "upstreams" (dict $name $upstream) "models" (dict $pool.modelName (dict "upstream" $name)) "defaults" $defaults) -}}
{{- end }}

{{- define "gateway.metricsKey" -}}
{digest: "${file:/secrets/metrics-key-digest}", id: prometheus, scopes: [metrics]}
{{- end }}
