// Sign-in by an issuer: authorization code with PKCE, whose code the gateway exchanges for the user's token. The
// token stays where a key does. Only what begins a sign-in is in the tab's storage, until the issuer has answered.
import { RequestError, send } from "./api.js";

const PENDING = "sign-on.pending";
// Name of the issuer: a reloaded page signs in again, without a question while the issuer's own session lasts.
const SIGNED_ON = "sign-on.issuer";
const ERROR_NAME = /^[a-z_]{1,40}$/;

const address = () => `${location.origin}/ui`;

function base64url(bytes) {
  return btoa(String.fromCharCode(...bytes)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

const random = (bytes) => base64url(crypto.getRandomValues(new Uint8Array(bytes)));

// The browser computes digests for pages with TLS, and on its own machine.
export const canSignIn = () => crypto.subtle !== undefined;

export const remember = (name) => sessionStorage.setItem(SIGNED_ON, name);

// The issuer to sign in with at once, as this page was signed in before it was loaded again.
export function takeRemembered() {
  const name = sessionStorage.getItem(SIGNED_ON);
  sessionStorage.removeItem(SIGNED_ON);
  return name;
}

export async function begin(offer, view) {
  const pending = { name: offer.name, issuer: offer.issuer, view, state: random(24), nonce: random(24), verifier: random(48) };
  const challenge = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(pending.verifier));
  sessionStorage.setItem(PENDING, JSON.stringify(pending));
  const target = new URL(offer.authorization_endpoint);
  const query = {
    response_type: "code",
    client_id: offer.client_id,
    redirect_uri: address(),
    scope: offer.scope,
    state: pending.state,
    nonce: pending.nonce,
    code_challenge: base64url(new Uint8Array(challenge)),
    code_challenge_method: "S256",
  };
  for (const [name, value] of Object.entries(query)) target.searchParams.set(name, value);
  visit(target);
}

// Only addresses of the web: the gateway has checked them too.
function visit(target) {
  if (!["https:", "http:"].includes(target.protocol)) throw new RequestError(0, "the issuer's address cannot be visited");
  location.assign(target);
}

function takePending() {
  const text = sessionStorage.getItem(PENDING);
  sessionStorage.removeItem(PENDING);
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// Completes the sign-in whose answer is in the address, and returns its user; null if there is none.
export async function complete() {
  const answer = new URLSearchParams(location.search);
  const pending = takePending();
  if (!answer.has("state")) return null;
  // A code works once: it must not be in the history, nor be sent again by a reload.
  history.replaceState(null, "", `${location.pathname}#/${pending?.view ?? ""}`);
  // A page that did not begin the sign-in would be signed in as another user.
  if (!pending || answer.get("state") !== pending.state) {
    throw new RequestError(0, "this sign-in was not begun in this tab; sign in again");
  }
  if (answer.has("iss") && answer.get("iss") !== pending.issuer) {
    throw new RequestError(0, "another issuer answered the sign-in; sign in again");
  }
  if (!answer.get("code")) {
    const name = answer.get("error") ?? "";
    throw new RequestError(0, `the issuer did not sign you in (${ERROR_NAME.test(name) ? name : "no reason"})`);
  }
  const body = {
    name: pending.name,
    code: answer.get("code"),
    code_verifier: pending.verifier,
    nonce: pending.nonce,
    redirect_uri: address(),
  };
  const { content } = await send("/ui/sign-on", { body });
  return { ...content, name: pending.name };
}

// Ends the issuer's session too, where it offers that: the next person would be signed in without a question.
export function signOut(offer) {
  sessionStorage.removeItem(SIGNED_ON);
  if (!offer?.end_session_endpoint) return;
  const target = new URL(offer.end_session_endpoint);
  target.searchParams.set("client_id", offer.client_id);
  target.searchParams.set("post_logout_redirect_uri", address());
  visit(target);
}
