"""Calls as OpenTelemetry spans; loaded only if the config enables traces.

A call is a span with its stages as children; below `dispatch` are the waits and attempts of its slices. An
attempt that carries several calls is a span in the trace of each: the first call's span is the client's, sent
upstream as the parent, and the others are internal and link to it, so that sums over the spans of clients
count its tokens once. Names follow OpenTelemetry's HTTP and GenAI conventions, else `gateway.*`; the last
GenAI conventions, and those of v1.41, have the same names for all that is in these spans.
Rule: no inputs and no keys in spans; of a key only its id. A trace that is not recorded creates no spans,
but its id is propagated.
"""

import random
import re
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backends.contract.vectors import Vectors
from backends.tracing import Carrier, EnginePhases
from gateway import __version__
from gateway.config.schema import Tracing
from gateway.events import AttemptStarted, CallFinished
from gateway.telemetry.otlp import (
    EXPORT_TIMEOUT_S,
    error_type,
    log_losses_only,
    operation_name,
    resource_of,
    server_attributes,
)

# Spans that wait to be sent; further ones are dropped.
QUEUE_MAX = 8192
EXPORT_MAX = 512
EXPORT_EVERY_MS = 2000
# Shorter waits are not shown: the event loop's timers have a resolution of a millisecond.
WAIT_MIN_S = 0.002

# `traceparent` with the sampled flag cleared (W3C Trace Context, version 00).
UNRECORDED = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")

_W3C = TraceContextTextMapPropagator()
_EMPTY = Context()


class CallTraces:
    """Starts the trace of each call.

    share: part of the calls to record where the caller sent no sampled flag, from 0 to 1.
    """

    def __init__(self, provider: TracerProvider, share: float) -> None:
        self._provider = provider
        self._share = share
        self._tracer = provider.get_tracer("gateway", __version__)

    def begin(self, name: str, started_s: float, traceparent: str, tracestate: str) -> "CallTrace":
        """Start the span of a call, in its caller's trace if the caller sent a valid one.

        started_s: on time.perf_counter, as in the call's timeline. A call that is not recorded bypasses the
        SDK, which would cost most calls more than their log line.
        """
        unrecorded = UNRECORDED.fullmatch(traceparent) if traceparent else None
        if unrecorded is not None:
            headers = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
            return CallTrace(unrecorded[1], headers)
        context = _caller_context(traceparent, tracestate)
        if context is None and random.random() >= self._share:  # noqa: S311 - sampling keeps no secret
            return _unrecorded_trace()
        zero_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            name, context or _EMPTY, SpanKind.SERVER, start_time=zero_ns + round(started_s * 1e9)
        )
        return RecordedCall(self._tracer, span, zero_ns)

    def close(self) -> None:
        """Send the remaining spans; blocks until the collector has taken them or the timeout has passed."""
        self._provider.shutdown()


class CallTrace:
    """Trace of one call that is not recorded, only propagated. trace_id: 32 hex digits, as in logs."""

    recorded = False

    def __init__(self, trace_id: str, headers: Mapping[str, str]) -> None:
        self.trace_id = trace_id
        self._headers = headers

    def stage(self, name: str, started_s: float, ended_s: float) -> None:
        """Record a lap of the call's timeline, on the timeline's clock."""

    def waited(self, seconds: float) -> None:
        """Record that a slice has waited in the lane until now."""

    def finish(self, call: CallFinished) -> None:
        """End the trace of an answered call."""

    def carrier(self) -> Carrier:
        """Return the headers of an attempt in which no call is recorded."""
        return Carrier(self._headers)


class RecordedCall(CallTrace):
    """Span of one call with its children. zero_ns: Unix time at which time.perf_counter was 0."""

    recorded = True

    def __init__(self, tracer: Tracer, span: Span, zero_ns: int) -> None:
        super().__init__(format_trace_id(span.get_span_context().trace_id), {})
        self.tracer = tracer
        self.span = span
        self._context = set_span_in_context(span, _EMPTY)
        self._dispatch: Span | None = None
        self._zero_ns = zero_ns

    def stage(self, name: str, started_s: float, ended_s: float) -> None:
        """Create a span for the lap; `queue` and `upstream` are shown by the spans below `dispatch`."""
        if name == "upstream" and self._dispatch is not None:
            self._dispatch.end(self._unix_ns(ended_s))
        elif name not in ("queue", "upstream"):
            span = self.tracer.start_span(name, self._context, start_time=self._unix_ns(started_s))
            span.end(self._unix_ns(ended_s))
            # The answer of the ledger to a provisional grant comes after the dispatch.
            if name == "quota" and self._dispatch is None:
                self._dispatch = self.tracer.start_span(
                    "dispatch", self._context, start_time=self._unix_ns(ended_s)
                )

    def waited(self, seconds: float) -> None:
        """Create a span for the wait, unless it was too short."""
        if seconds >= WAIT_MIN_S:
            now_ns = time.time_ns()
            started_ns = now_ns - round(seconds * 1e9)
            self.tracer.start_span("queue", self.below_dispatch(), start_time=started_ns).end(now_ns)

    def finish(self, call: CallFinished) -> None:
        """Set the attributes of the span and end it."""
        if self._dispatch is not None and self._dispatch.is_recording():
            self._dispatch.end()
        self.span.set_attributes(_attributes(call))
        if call.status >= 500:
            # By the HTTP conventions a 4xx is no error of a server span.
            self.span.set_status(StatusCode.ERROR)
        self.span.end()

    def begin_attempt(self, others: Sequence["RecordedCall"], started: AttemptStarted) -> "AttemptTrace":
        """Start an attempt that carries this call, and the other recorded calls of its batch."""
        return AttemptTrace(self, others, started)

    def below_dispatch(self) -> Context:
        """Return the parent of attempts and waits."""
        return self._context if self._dispatch is None else set_span_in_context(self._dispatch, _EMPTY)

    def _unix_ns(self, perf_counter_s: float) -> int:
        return self._zero_ns + round(perf_counter_s * 1e9)


class AttemptTrace:
    """One attempt in the traces of its calls. carrier: the headers that are sent upstream."""

    def __init__(self, lead: RecordedCall, others: Sequence[RecordedCall], started: AttemptStarted) -> None:
        self._tracer = lead.tracer
        links = [Link(call.span.get_span_context()) for call in others]
        self._lead = _attempt_span(lead, SpanKind.CLIENT, started, links)
        self._context = set_span_in_context(self._lead, _EMPTY)
        link = Link(self._lead.get_span_context())
        self._spans = [
            self._lead,
            *(_attempt_span(call, SpanKind.INTERNAL, started, [link]) for call in others),
        ]
        headers: dict[str, str] = {}
        _W3C.inject(headers, self._context)
        self.carrier = Carrier(headers)

    def add_reply(self, tokens: int, vectors: Vectors | None) -> None:
        """Set what a reply shows. tokens: 0 if none are counted. vectors: one for each input, or None."""
        if tokens:
            self._lead.set_attribute("gen_ai.usage.input_tokens", tokens)
        if vectors is not None:
            self._lead.set_attribute("gen_ai.embeddings.dimension.count", vectors.shape[1])

    def end(self, outcome: str, status: str | None = None, words: str = "") -> None:
        """End the spans; a second call has no effect.

        outcome: "ok", or the kind of the error. status, words: of the upstream's answer to it.
        """
        if self._spans and self.carrier.phases is not None:
            self._add_phases(self.carrier.phases)
        for span in self._spans:
            if outcome != "ok":
                span.set_attributes(
                    {"error.type": error_type(outcome, status), "gateway.attempt.outcome": outcome}
                )
                span.set_status(StatusCode.ERROR)
            if status is not None:
                span.set_attribute("gateway.upstream.status", status)
            if words:
                span.set_attribute("gateway.upstream.words", words)
            span.end()
        self._spans = []

    def _add_phases(self, phases: EnginePhases) -> None:
        """Add the phases that an engine reported, below the first call's attempt."""
        at_ns = phases.started_ns
        for name in ("tokenize", "queue", "forward"):
            ended_ns = at_ns + round(getattr(phases, f"{name}_s") * 1e9)
            self._tracer.start_span(f"engine {name}", self._context, start_time=at_ns).end(ended_ns)
            at_ns = ended_ns


def _caller_context(traceparent: str, tracestate: str) -> Context | None:
    """Return the trace that a caller sent, None if it sent no valid one."""
    if not traceparent:
        return None
    context = _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, _EMPTY)
    return context if get_current_span(context).get_span_context().is_valid else None


def _unrecorded_trace() -> CallTrace:
    """Return a new trace that is not recorded.

    It has ids nevertheless: they join log lines, and their cleared flag asks upstream servers not to
    record.
    """
    trace_id = f"{random.getrandbits(128) or 1:032x}"
    span_id = f"{random.getrandbits(64) or 1:016x}"
    return CallTrace(trace_id, {"traceparent": f"00-{trace_id}-{span_id}-00"})


def _attempt_span(call: RecordedCall, kind: SpanKind, started: AttemptStarted, links: Sequence[Link]) -> Span:
    """Start the span of an attempt in one of its calls. Only a client's has the attributes of GenAI."""
    operation, model = operation_name(started.operation), started.model
    attributes: dict[str, str | int] = {
        "gateway.upstream": started.upstream,
        "gateway.replica": started.replica,
        "gateway.batch.inputs": started.inputs,
        "gateway.batch.calls": started.calls,
        "gateway.attempt.hedge": started.hedge,
        "gateway.attempt.tries_before": started.tries_before,
    }
    if kind is SpanKind.CLIENT:
        attributes |= server_attributes(operation, started.server, model)
    name = f"{operation} {model}".rstrip()
    return call.tracer.start_span(name, call.below_dispatch(), kind, attributes, links)


def _attributes(call: CallFinished) -> Mapping[str, str | int | tuple[str, ...]]:
    """Return the attributes of a call's span; unknown values are left out."""
    attributes: dict[str, str | int | tuple[str, ...] | None] = {
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status,
        "error.type": None if call.outcome == "ok" else call.outcome,
        "gateway.operation": None if call.operation is None else operation_name(call.operation),
        "gateway.model": call.model,
        "gateway.tokens": call.tokens,
        "gateway.tenant": call.tenant,
        "gateway.key_id": call.key_id,
        "gateway.end_user": call.end_user,
        "gateway.inputs": call.inputs,
        "gateway.request_id": call.request_id,
        "gateway.replicas": call.replicas or None,
        "gateway.attempts": call.attempts or None,
        "gateway.upstream.status": call.upstream_status,
        "gateway.upstream.words": call.upstream_words,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def create_traces(settings: Tracing, processor: SpanProcessor, instance: str = "") -> CallTraces:
    """Return traces that go to a span processor; `settings.sample` is the share that is recorded.

    instance: identifies this process, as in `resource_of`.
    """
    provider = TracerProvider(
        # CallTraces decides which calls are recorded, before it starts a span.
        sampler=ALWAYS_ON,
        resource=resource_of(settings.service_name, instance),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return CallTraces(provider, settings.sample)


def create_exporting_traces(settings: Tracing, instance: str) -> CallTraces:
    """Return traces that a thread of its own sends to a collector. instance: as in `create_traces`."""
    # From the extra `otlp`; without it the config was refused before this point.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    log_losses_only()
    exporter = OTLPSpanExporter(settings.endpoint, headers=settings.headers, timeout=EXPORT_TIMEOUT_S)
    return create_traces(
        settings,
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_MAX,
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=EXPORT_MAX,
        ),
        instance,
    )
