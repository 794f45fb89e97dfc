"""/admin/audit: the records of what operators have changed."""

import time
from typing import Annotated

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from gateway.api.operators.access import OPERATORS, store_errors
from gateway.api.operators.admin import Admin
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.audit.query import PAGE_MAX, AuditPage, AuditQuery, InvalidCursor
from gateway.audit.records import time_text
from gateway.audit.trail import AuditTrail, NoTrail
from gateway.config.durations import moment_s
from gateway.errors import InvalidInput, NotFound

FAILURES = document_errors(TEI)


@get("/admin/audit", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_records(
    audit: NamedDependency[AuditTrail],
    admin: NamedDependency[Admin],
    object_: Annotated[str, QueryParameter(name="object")] = "",
    since: FromQuery[str] = "",
    until: FromQuery[str] = "",
    actor: FromQuery[str] = "",
    limit: FromQuery[int] = 100,
    cursor: FromQuery[str] = "",
) -> AuditPage:
    """List what operators have changed, the newest first.

    `object` is one such as `tenant/acme`, or a kind such as `tenant`. `since` and `until` are days, moments
    or durations ago, such as `12h`. `next` of a page is the `cursor` of the one after it.
    """
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidInput(f"limit: from 1 to {PAGE_MAX}", param="limit")
    query = AuditQuery(_time("since", since), _time("until", until), object_, actor, limit, cursor)
    try:
        with store_errors():
            await admin.settle_records()
            return await audit.page(query)
    except InvalidCursor as error:
        raise InvalidInput(str(error), param="cursor") from error
    except NoTrail as error:
        raise NotFound(str(error)) from error


def _time(name: str, text: str) -> str:
    """Return a time as records have it, empty for none. Raises: InvalidInput."""
    try:
        return time_text(moment_s(text, time.time())) if text else ""
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: {error}", param=name) from error


HANDLERS = [list_records]
