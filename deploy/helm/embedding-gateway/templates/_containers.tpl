{{/* Container of a pool by its kind, but for lifecycle, resources and rights: a list of the root and the pool. */}}
{{- define "gateway.container.engine" -}}
{{- $root := index . 0 -}}
image: {{ include "gateway.image" (list $root (index . 1).flavour (index . 1).digest) }}
{{- if ne $root.Values.image.pullPolicy "IfNotPresent" }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end }}
args: [serve, -c, /etc/gateway/router.yaml]
env:
  - name: GATEWAY_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ $root.Values.secret.name }}, key: upstream-key}
ports:
  - {name: http, containerPort: 8080}
  - {name: operators, containerPort: 8081}
# The pod is ready once the model is loaded.
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /livez, port: http}
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
volumeMounts:
  - {name: config, mountPath: /etc/gateway, readOnly: true}
  - {name: secrets, mountPath: /secrets, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: weights, mountPath: /weights}
{{- end }}

{{- define "gateway.container.tei" -}}
{{- $pool := index . 1 -}}
image: {{ $pool.image }}
# Set explicitly, because TEI would otherwise use the variable HOSTNAME, which is the pod's name.
args: {{- toYaml (concat (list "--model-id" $pool.model "--hostname" "0.0.0.0" "--port" "8080") $pool.args) | nindent 2 }}
env:
  - name: API_KEY
    valueFrom:
      secretKeyRef: {name: {{ (index . 0).Values.secret.name }}, key: upstream-key}
  - {name: HUGGINGFACE_HUB_CACHE, value: /data}
  - {name: HOME, value: /tmp}
ports:
  - {name: http, containerPort: 8080}
# TEI listens after its model is loaded, which may include a download.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 300
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: tmp, mountPath: /tmp}
{{- end }}
