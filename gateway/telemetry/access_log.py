"""Events as log lines: one a call, one a change of a replica. Inputs and keys are in no event."""

import logging

from gateway.events import CallFinished, Event, ReplicaChanged, SpaceChecked, StoreChanged

logger = logging.getLogger("gateway")

# Watchers ask every few seconds; their lines would bury everybody else's.
QUIET_ROUTES = frozenset({"/livez", "/readyz", "/health", "/models/{model}/health", "/metrics"})


def log_event(event: Event) -> None:
    """Write what an operator would want to have seen."""
    match event:
        case CallFinished():
            if event.route not in QUIET_ROUTES:
                _log_call(event)
        case StoreChanged(away=True):
            logger.warning("the quotas' store is away (%s): counting without it", event.reason)
        case StoreChanged(away=False):
            logger.info("the quotas' store is back (%s)", event.reason)
        case SpaceChecked(is_news=True):
            _log_space(event)
        case ReplicaChanged():
            level = logging.WARNING if event.state == "down" else logging.INFO
            logger.log(
                level,
                "upstream %s: %s is %s (%s)",
                event.upstream,
                event.replica,
                event.state,
                event.reason,
            )


def _log_call(event: CallFinished) -> None:
    # What `logger.info` does, less its search for the line of code that called it.
    if logger.isEnabledFor(logging.INFO):
        logger.handle(logging.LogRecord(logger.name, logging.INFO, "", 0, _call_line(event), None, None))


def _log_space(event: SpaceChecked) -> None:
    match event.outcome:
        case "fits":
            logger.info("upstream %s: %s is in vector space %s", event.upstream, event.replica, event.reason)
        case "differs":
            logger.error(
                "upstream %s: %s gives other vectors: %s", event.upstream, event.replica, event.reason
            )
        case "unchecked":
            logger.warning(
                "upstream %s: the vectors of %s cannot be checked (%s)",
                event.upstream,
                event.replica,
                event.reason,
            )


def _call_line(event: CallFinished) -> str:
    outcome = "" if event.outcome == "ok" else f"  {event.outcome}"
    return (
        f"{event.method} {event.route} {event.status}{outcome}  {event.duration_s * 1000:.1f} ms"
        f"  tenant={event.tenant or '-'}  model={event.model or '-'}"
        f"  inputs={event.inputs}  tokens={event.tokens}  id={event.request_id}"
    )
