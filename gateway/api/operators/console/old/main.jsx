// The console at /ui. Rule: it shows what the key may see, and only what the gateway it came from sends.
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { hasKey, send, setKey, STATUS_TIMEOUT_MS } from "./api.js";
import { clock, count, duration, zone } from "./format.js";
import { useOnce, usePolling, useRoute, useSignOn } from "./hooks.js";
import { Calls } from "./pages/calls.jsx";
import { Jobs } from "./pages/jobs.jsx";
import { Models } from "./pages/models.jsx";
import { Overview } from "./pages/overview.jsx";
import { Own } from "./pages/own.jsx";
import { Playground } from "./pages/playground.jsx";
import { TenantsAndKeys } from "./pages/tenants.jsx";
import { Upstreams } from "./pages/upstreams.jsx";
import { Note, Problem } from "./parts.jsx";
import { ratesBetween } from "./rates.js";
import { canSignIn } from "./sign-on.js";

const REFRESH_INTERVAL_MS = 1000;
const OPERATOR_SCOPES = ["admin", "admin:read", "metrics"];
// name: in the address. operators: its content comes from /admin. scopes: a key needs one of them.
const PAGES = [
  { name: "overview", title: "Overview", show: Overview, operators: true },
  { name: "upstreams", title: "Upstreams", show: Upstreams, operators: true },
  { name: "models", title: "Models", show: Models, operators: true },
  { name: "tenants", title: "Tenants and keys", show: TenantsAndKeys, operators: true },
  { name: "calls", title: "Recent calls", show: Calls, operators: true },
  { name: "jobs", title: "Jobs", show: Jobs, operators: false },
  { name: "playground", title: "Playground", show: Playground, operators: false, scopes: ["embed", "rerank"] },
  { name: "usage", title: "My key", show: Own, operators: false },
];
const OWN = "usage";
const NAMES = PAGES.map((page) => page.name);

function problemOf(problem) {
  if (!problem) return "";
  if (problem.status === 404) return "The pages of operators are on the address admin.listen of router.yaml.";
  return problem.status ? problem.message : `${problem.message}; asking again`;
}

function StatusLine({ snapshot, lastAtS, problem }) {
  if (problem || !snapshot) {
    const seen = lastAtS ? `Last seen at ${clock(lastAtS)}; everything below is from then.` : "Not seen yet.";
    const text = problem ? seen : "Loading …";
    return (
      <p id="status-line" class="note">
        {text}
      </p>
    );
  }
  const workers = snapshot.workers > 1 ? ` · ${snapshot.workers} workers, seen by worker ${snapshot.worker}` : "";
  const store = snapshot.store.away ? `${snapshot.store.kind}, UNAVAILABLE` : snapshot.store.kind;
  const up = `up ${duration(snapshot.uptime_s)}`;
  return (
    <p id="status-line" class="note">
      {`version ${snapshot.version} · ${up}${workers} · quotas in ${store} · ${clock(snapshot.at_s)} (${zone(snapshot.at_s)})`}
    </p>
  );
}

// The pages that the key can use. isDenied: it is not for operators. scopes: undefined while they are not known.
const pagesFor = (isDenied, scopes) =>
  PAGES.filter((page) => !(page.operators && isDenied)).filter(
    (page) => !page.scopes || !scopes || page.scopes.some((scope) => scopes.includes(scope)),
  );

// Whether the typed key is accepted: people who do not see the lists change hear it.
function keyNote(listed, isDenied) {
  if (!hasKey()) return "";
  if (listed.content) {
    const { models, scopes } = listed.content;
    if (scopes?.every((scope) => OPERATOR_SCOPES.includes(scope))) return "Operator's key accepted: it calls no models. ";
    const denied = isDenied ? " Pages of operators need the scope admin or admin:read." : "";
    return `Key accepted, models: ${count(models.length)}.${denied} `;
  }
  if (!listed.problem) return "";
  return listed.problem.status === 401 ? `Key refused: ${listed.problem.message}. ` : "";
}

function KeyForm({ onUse, note }) {
  const [text, setText] = useState("");
  return (
    <form
      id="key-form"
      autocomplete="off"
      onSubmit={(event) => {
        event.preventDefault();
        onUse(text.trim());
      }}
    >
      <label for="key">API key</label>
      <input
        id="key"
        type="password"
        autocomplete="off"
        spellcheck={false}
        aria-describedby="key-note"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <button>Use</button>
      <p id="key-note" class="note">
        <span role="status">{note}</span>
        Kept only in this page&apos;s memory, until the page is closed or reloaded.
      </p>
    </form>
  );
}

function SignOn({ offers, user, problem, signIn, signOut }) {
  if (!offers.length && !user && !problem) return null;
  const isSafe = canSignIn();
  return (
    <div id="sign-on" class="row">
      {user ? (
        <>
          <span id="signed-in">
            Signed in as {user.key}, tenant {user.tenant}
          </span>
          <button type="button" class="quiet" onClick={signOut}>
            Sign out
          </button>
        </>
      ) : (
        offers.map((offer) => (
          <button type="button" disabled={!isSafe || !offer.authorization_endpoint} onClick={() => signIn(offer)}>
            Sign in with {offer.name}
          </button>
        ))
      )}
      {!isSafe && <Note>A sign-in needs HTTPS.</Note>}
      {!user && offers.some((offer) => !offer.authorization_endpoint) && <Note>An issuer cannot be reached now.</Note>}
      <Problem id="sign-on-problem">{problem}</Problem>
    </div>
  );
}

function modelsProblem(problem) {
  if (!hasKey()) return "Type an API key above to try the models.";
  if (!problem) return "";
  return `Listing the models failed: ${problem.message}`;
}

// The snapshot now and before, for rates. An earlier snapshot of another key is not kept.
function useStatus(turn) {
  const { content, problem } = usePolling(
    async () => (await send("/admin/status", { timeoutMs: STATUS_TIMEOUT_MS })).content,
    REFRESH_INTERVAL_MS,
    turn,
  );
  const seen = useRef({ turn, now: null, before: null });
  if (seen.current.turn !== turn || !content) seen.current = { turn, now: null, before: null };
  if (content && content !== seen.current.now) seen.current = { turn, now: content, before: seen.current.now };
  return { snapshot: content, problem, rates: content && ratesBetween(seen.current.before, content) };
}

function App() {
  // Grows with each key that is used: everything is asked for again.
  const [turn, setTurn] = useState(0);
  const route = useRoute(NAMES);
  const use = (text) => {
    setKey(text);
    setTurn((before) => before + 1);
  };
  const signOn = useSignOn(route, use);
  const { snapshot, problem, rates } = useStatus(turn);
  const listed = useOnce(async () => {
    if (!hasKey()) throw new Error("no key");
    const models = (await send("/v1/models", { timeoutMs: STATUS_TIMEOUT_MS })).content.data;
    // Without the quota store the scopes are unknown, and the console offers every page.
    const own = await send("/usage", { timeoutMs: STATUS_TIMEOUT_MS }).catch(() => null);
    return { models, scopes: own?.content.scopes };
  }, turn);
  const isDenied = hasKey() && problem?.status === 403;
  const pages = pagesFor(isDenied, listed.content?.scopes);
  const page = PAGES.find(({ name }) => name === route);
  const isOffered = pages.includes(page);
  useEffect(() => {
    if (!isOffered) location.replace(`#/${OWN}`);
  }, [isOffered]);
  const heading = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    // People who use a screen reader hear that the page has changed.
    if (!isFirst.current) heading.current?.focus();
    isFirst.current = false;
    document.title = `${page.title} · Embedding gateway`;
  }, [route]);
  const shown = { snapshot, rates, turn, models: listed.content?.models ?? null, hasKey: hasKey(), problem: modelsProblem(listed.problem) };
  return (
    <>
      <a
        class="skip"
        href="#content"
        onClick={(event) => {
          event.preventDefault();
          heading.current?.focus();
        }}
      >
        Skip to the content
      </a>
      <header>
        <h1>Embedding gateway</h1>
        <KeyForm
          note={keyNote(listed, isDenied)}
          onUse={(text) => {
            signOn.forget();
            use(text);
          }}
        />
        <SignOn {...signOn} />
        <nav aria-label="Pages">
          {pages.map(({ name, title }) => (
            <a href={`#/${name}`} aria-current={name === route ? "page" : undefined}>
              {title}
            </a>
          ))}
          <a href="/docs">API</a>
        </nav>
      </header>
      <main id="content">
        <h2 tabIndex={-1} ref={heading}>
          {page.title}
        </h2>
        {page.operators && (
          <>
            <StatusLine snapshot={snapshot} lastAtS={snapshot?.at_s} problem={problem} />
            {problem?.isKeyMissing ? (
              <Note id="status-problem">{problem.message}</Note>
            ) : (
              <Problem id="status-problem">{problemOf(problem)}</Problem>
            )}
          </>
        )}
        {(!page.operators || snapshot) && <page.show key={route} {...shown} />}
      </main>
    </>
  );
}

render(<App />, document.getElementById("console"));
