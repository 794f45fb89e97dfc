"""/ui/sign-on: the console's sign-in by the issuers of single sign-on.

Both requests need no key: they come before there is one. The page keeps the token as it keeps a key, in its
memory, and sends it in a header, so that no other page can have the browser send it.
"""

from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import NO_KEY
from gateway.errors import Unauthenticated
from gateway.tenants.sign_on.sign_in import Code, Offer, SignedIn, SignIns

FAILURES = document_errors(TEI)
# Codes have some hundred characters, in odd cases two thousand.
BODY_BYTES_MAX = 16 * 1024
OPTIONS = route_options(for_operators=True, body_bytes_max=BODY_BYTES_MAX)
NO_STORE = {"cache-control": "no-store"}
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class OffersReply(msgspec.Struct, frozen=True):
    """Issuers by which users of the console can sign in."""

    data: list[Offer]


class SignInCode(msgspec.Struct, frozen=True):
    """Code that an issuer has sent to the page, with what the page began the sign-in with.

    name: of the issuer. code_verifier: of PKCE. redirect_uri: the page's address.
    """

    name: Text
    code: Text
    code_verifier: Annotated[str, msgspec.Meta(min_length=43, max_length=128)]
    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=128)]
    redirect_uri: Text


@get(
    "/ui/sign-on",
    responses={200: ResponseSpec(OffersReply, generate_examples=False, description="The issuers")} | FAILURES,
    tags=["Operators"],
    opt=OPTIONS,
    security=NO_KEY,
)
async def offers(sign_ins: NamedDependency[SignIns]) -> Response[bytes]:
    """Return the issuers by which users of the console can sign in.

    Nothing in it is secret.
    """
    return _reply(OffersReply(list(sign_ins.offers())))


@post(
    "/ui/sign-on",
    dto=OnePass[SignInCode],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(SignedIn, generate_examples=False, description="The user's token")}
    | FAILURES,
    tags=["Operators"],
    opt=OPTIONS,
    security=NO_KEY,
)
async def redeem(
    data: JSONBody[SignInCode],
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    sign_ins: NamedDependency[SignIns],
) -> Response[bytes]:
    """Exchange an issuer's code for the token of its user.

    The token is then sent as a key is.
    """
    authenticator = api.authenticator
    # Each exchange is a request to the issuer.
    authenticator.refuse_guessing(context)
    code = Code(data.name, data.code, data.code_verifier, data.nonce, data.redirect_uri)
    try:
        return _reply(await sign_ins.redeem(code, context.address))
    except Unauthenticated as refusal:
        authenticator.count_failure(context, data.code, refusal.message)
        raise


def _reply(content: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(content), headers=NO_STORE, media_type="application/json")


HANDLERS = [offers, redeem]
