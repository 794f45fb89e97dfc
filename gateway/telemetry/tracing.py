"""Calls as OpenTelemetry spans; the one door to its SDK, and loaded only where the config asks for traces.

A call is a span with its stages as children; below `dispatch` are the waits and attempts of its slices. An
attempt that carries several calls is a span in the trace of each: the first call's goes upstream, the
others' link to it. Names are OpenTelemetry's (its HTTP and GenAI conventions), else `gateway.*`.
Rule: no inputs, no keys; a trace that is not recorded makes no spans and is passed on as such.
"""

import logging
import random
import re
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
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

from backends.tracing import Carrier, EnginePhases
from gateway import __version__
from gateway.config.schema import Tracing
from gateway.events import AttemptStarted, CallFinished

# What OpenTelemetry calls our operations; it has no word for the others yet.
GENAI_OPERATIONS = {"embed": "embeddings"}
# Spans that wait to be sent; more are dropped.
QUEUE_MOST = 8192
EXPORT_MOST = 512
EXPORT_EVERY_MS = 2000
# How long a stopping worker tries to send what it still has.
SHUTDOWN_MS = 2000
# A wait shorter than this is none: the event loop tells time in milliseconds.
WAIT_LEAST_S = 0.002

# A caller's that says: not recorded (W3C Trace Context, version 00).
UNRECORDED = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")

_W3C = TraceContextTextMapPropagator()
_NOBODY = Context()


class CallTraces:
    """Begins the trace of each call. share: of those whose callers do not say whether to record them."""

    def __init__(self, provider: TracerProvider, share: float) -> None:
        self._provider = provider
        self._share = share
        self._tracer = provider.get_tracer("gateway", __version__)

    def begin(self, name: str, started_s: float, traceparent: str, tracestate: str) -> "CallTrace":
        """A call's span, in its caller's trace where that told one it can join.

        started_s: on time.perf_counter, as its timeline counts.
        What is not recorded does not come near the SDK: it would cost most calls more than their log line.
        """
        found = UNRECORDED.fullmatch(traceparent) if traceparent else None
        if found is not None:
            told = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
            return CallTrace(found[1], told)
        context = _of_caller(traceparent, tracestate)
        if context is None and random.random() >= self._share:  # noqa: S311 - it keeps no secret
            return _fresh()
        zero_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            name, context or _NOBODY, SpanKind.SERVER, start_time=zero_ns + round(started_s * 1e9)
        )
        return RecordedCall(self._tracer, span, zero_ns)

    def close(self) -> None:
        """Send what there is; blocks for as long as the collector takes."""
        self._provider.shutdown()


class CallTrace:
    """One call's trace; this one is not recorded and only passed on. trace_id is as logs tell it."""

    recorded = False

    def __init__(self, trace_id: str, headers: Mapping[str, str]) -> None:
        self.trace_id = trace_id
        self._headers = headers

    def stage(self, name: str, started_s: float, ended_s: float) -> None:
        """A lap of the call's timeline has ended, on that one's clock."""

    def waited(self, seconds: float) -> None:
        """A slice has waited in the lane until now."""

    def finish(self, call: CallFinished) -> None:
        """The call has been answered."""

    def carrier(self) -> Carrier:
        """What goes upstream with an attempt of which no call is recorded."""
        return Carrier(self._headers)


class RecordedCall(CallTrace):
    """One call's span and what hangs below it. zero_ns: when time.perf_counter was 0, as Unix time."""

    recorded = True

    def __init__(self, tracer: Tracer, span: Span, zero_ns: int) -> None:
        super().__init__(format_trace_id(span.get_span_context().trace_id), {})
        self.tracer = tracer
        self.span = span
        self._here = set_span_in_context(span, _NOBODY)
        self._dispatch: Span | None = None
        self._zero_ns = zero_ns

    def stage(self, name: str, started_s: float, ended_s: float) -> None:
        """A span for it; the time of `queue` and `upstream` is told by the spans below `dispatch`."""
        if name == "upstream" and self._dispatch is not None:
            self._dispatch.end(self._unix_ns(ended_s))
        elif name not in ("queue", "upstream"):
            span = self.tracer.start_span(name, self._here, start_time=self._unix_ns(started_s))
            span.end(self._unix_ns(ended_s))
            if name == "quota":
                self._dispatch = self.tracer.start_span(
                    "dispatch", self._here, start_time=self._unix_ns(ended_s)
                )

    def waited(self, seconds: float) -> None:
        """A span for it, unless it was no wait."""
        if seconds >= WAIT_LEAST_S:
            now_ns = time.time_ns()
            begun_ns = now_ns - round(seconds * 1e9)
            self.tracer.start_span("queue", self.below_dispatch(), start_time=begun_ns).end(now_ns)

    def finish(self, call: CallFinished) -> None:
        """Its span has all its attributes, and ends."""
        if self._dispatch is not None and self._dispatch.is_recording():
            self._dispatch.end()
        self.span.set_attributes(_told(call))
        if call.status >= 500:
            # By HTTP's conventions a 4xx is no error of the server's span.
            self.span.set_status(StatusCode.ERROR)
        self.span.end()

    def begin_attempt(self, others: Sequence["RecordedCall"], started: AttemptStarted) -> "AttemptTrace":
        """An attempt that carries this call, and those of others that are recorded too."""
        return AttemptTrace(self, others, started)

    def below_dispatch(self) -> Context:
        """What attempts and waits hang from."""
        return self._here if self._dispatch is None else set_span_in_context(self._dispatch, _NOBODY)

    def _unix_ns(self, perf_counter_s: float) -> int:
        return self._zero_ns + round(perf_counter_s * 1e9)


class AttemptTrace:
    """One attempt in the traces of the calls it carries; carrier is what goes upstream with it."""

    def __init__(self, lead: RecordedCall, others: Sequence[RecordedCall], started: AttemptStarted) -> None:
        self._tracer = lead.tracer
        first = _attempt(lead, started, [Link(one.span.get_span_context()) for one in others])
        link = Link(first.get_span_context())
        self._first = set_span_in_context(first, _NOBODY)
        self._spans = [first, *(_attempt(one, started, [link]) for one in others)]
        headers: dict[str, str] = {}
        _W3C.inject(headers, self._first)
        self.carrier = Carrier(headers)

    def end(self, outcome: str) -> None:
        """It came back, or was called off. outcome: "ok", or what is wrong; the first counts."""
        if self._spans and self.carrier.phases is not None:
            self._show(self.carrier.phases)
        for span in self._spans:
            if outcome != "ok":
                span.set_attribute("error.type", outcome)
                span.set_status(StatusCode.ERROR)
            span.end()
        self._spans = []

    def _show(self, phases: EnginePhases) -> None:
        """What an engine told of itself, below the attempt that asked it."""
        at_ns = phases.started_ns
        for name in ("tokenize", "queue", "forward"):
            ended_ns = at_ns + round(getattr(phases, f"{name}_s") * 1e9)
            self._tracer.start_span(f"engine {name}", self._first, start_time=at_ns).end(ended_ns)
            at_ns = ended_ns


def _of_caller(traceparent: str, tracestate: str) -> Context | None:
    """The trace that a caller told; None where it told none that can be joined."""
    if not traceparent:
        return None
    context = _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, _NOBODY)
    return context if get_current_span(context).get_span_context().is_valid else None


def _fresh() -> CallTrace:
    """Ids all the same: they join log lines, and tell servers behind that nothing is recorded."""
    trace_id = f"{random.getrandbits(128) or 1:032x}"
    span_id = f"{random.getrandbits(64) or 1:016x}"
    return CallTrace(trace_id, {"traceparent": f"00-{trace_id}-{span_id}-00"})


def _attempt(call: RecordedCall, started: AttemptStarted, links: Sequence[Link]) -> Span:
    operation = GENAI_OPERATIONS.get(started.operation, started.operation)
    return call.tracer.start_span(
        f"{operation} {started.upstream}",
        call.below_dispatch(),
        SpanKind.CLIENT,
        {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": started.model,
            "gateway.upstream": started.upstream,
            "gateway.replica": started.replica,
            "gateway.batch.inputs": started.inputs,
            "gateway.batch.calls": started.calls,
            "gateway.attempt.hedge": started.hedge,
            "gateway.attempt.tries_before": started.tries_before,
        },
        links,
    )


def _told(call: CallFinished) -> Mapping[str, str | int]:
    """Attributes of a call's span; what is not known is left out."""
    told: dict[str, str | int | None] = {
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status,
        "error.type": None if call.outcome == "ok" else call.outcome,
        "gen_ai.operation.name": GENAI_OPERATIONS.get(call.operation or "", call.operation),
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": call.tokens,
        "gateway.tenant": call.tenant,
        "gateway.inputs": call.inputs,
        "gateway.request_id": call.request_id,
    }
    return {name: value for name, value in told.items() if value is not None}


def sampled(settings: Tracing, processor: SpanProcessor) -> CallTraces:
    """Spans to a processor: of every call whose caller records, and of a share of those that say nothing."""
    provider = TracerProvider(
        # Who is recorded is decided before a span is begun.
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": settings.service_name, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return CallTraces(provider, settings.sample)


def exported(settings: Tracing) -> CallTraces:
    """Spans to an OpenTelemetry collector, from a thread of its own."""
    # The extra `otlp`; without it the config is refused before this is reached.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # It has a line for each retry, no two alike; what is lost in the end is an error.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    exporter = OTLPSpanExporter(settings.endpoint, headers=settings.headers, timeout=SHUTDOWN_MS / 1000)
    return sampled(
        settings,
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_MOST,
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=EXPORT_MOST,
        ),
    )
