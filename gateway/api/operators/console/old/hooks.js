// State that pages share: polling, the key, and sign-in.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { RequestError, send } from "./api.js";
import { begin, canSignIn, complete, remember, signOut, takeRemembered } from "./sign-on.js";

// Of setTimeout, whose milliseconds are 32 bits.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

// The page that the part of the address behind # names.
export function useRoute(names) {
  const read = () => {
    const name = location.hash.replace(/^#\/?/, "");
    return names.includes(name) ? name : names[0];
  };
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const follow = () => setRoute(read());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, [names.join()]);
  return names.includes(route) ? route : names[0];
}

// Calls `read` at each interval while the page is visible. turn: another value discards what was read. A reply of
// 4xx ends it, because the gateway throttles addresses that keep sending a wrong key.
export function usePolling(read, intervalMs, turn, isActive = true) {
  const [state, setState] = useState({ content: null, problem: null });
  const latest = useRef(read);
  latest.current = read;
  useEffect(() => setState({ content: null, problem: null }), [turn]);
  useEffect(() => {
    if (!isActive) return undefined;
    let timer = null;
    let isOver = false;
    let isRefused = false;
    async function step() {
      clearTimeout(timer);
      if (isOver || isRefused) return;
      if (!document.hidden) {
        try {
          const content = await latest.current();
          if (isOver) return;
          setState({ content, problem: null });
        } catch (error) {
          if (isOver) return;
          isRefused = error.status >= 400 && error.status < 500;
          setState((before) => ({ content: isRefused ? null : before.content, problem: error }));
        }
      }
      timer = setTimeout(step, intervalMs);
    }
    const wake = () => document.hidden || step();
    document.addEventListener("visibilitychange", wake);
    step();
    return () => {
      isOver = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
    };
  }, [intervalMs, turn, isActive]);
  return state;
}

// The action of a form or a button: busy while it runs, and its outcome or problem afterwards. What `run` is called
// with, a button's subject, is passed on.
export function useAction(action) {
  const [state, setState] = useState({ busy: false, problem: "", outcome: null });
  const latest = useRef(action);
  latest.current = action;
  const run = useCallback(
    async (subject) => {
      subject?.preventDefault?.();
      setState((before) => ({ ...before, busy: true }));
      try {
        const outcome = await latest.current(subject);
        setState({ busy: false, problem: "", outcome });
      } catch (error) {
        const isKnown = error instanceof RequestError;
        if (!isKnown) console.error(error);
        const problem = isKnown ? error.message : "this page does not understand the reply";
        setState({ busy: false, problem, outcome: null });
      }
    },
    [],
  );
  return { ...state, run };
}

// The user who has signed in by an issuer, and the issuers. onChange: called with the user's token, empty without one.
export function useSignOn(route, onChange) {
  const [offers, setOffers] = useState([]);
  const [user, setUser] = useState(null);
  const [problem, setProblem] = useState("");
  const latest = useRef(onChange);
  latest.current = onChange;
  const change = (next, message = "") => {
    setUser(next);
    setProblem(message);
    latest.current(next?.token ?? "");
  };
  const attempt = async (action) => {
    try {
      await action();
    } catch (error) {
      if (!(error instanceof RequestError)) console.error(error);
      setProblem(error instanceof RequestError ? error.message : "this browser cannot sign in");
    }
  };
  useEffect(() => {
    attempt(async () => {
      const signedIn = await complete();
      const remembered = takeRemembered();
      if (signedIn) {
        remember(signedIn.name);
        change(signedIn);
      }
      const { content } = await send("/ui/sign-on");
      setOffers(content.data);
      const again = content.data.find(({ name }) => name === remembered);
      if (!signedIn && again?.authorization_endpoint && canSignIn()) await begin(again, route);
    });
  }, []);
  useEffect(() => {
    if (!user) return undefined;
    const left = Math.min(user.expires_in_s * 1000, LONGEST_TIMER_MS);
    const timer = setTimeout(() => change(null, "Your sign-in has expired; sign in again."), left);
    return () => clearTimeout(timer);
  }, [user]);
  return {
    offers,
    user,
    problem,
    signIn: (offer) => attempt(() => begin(offer, route)),
    signOut: () =>
      attempt(() => {
        const offer = offers.find(({ name }) => name === user.name);
        change(null);
        signOut(offer);
      }),
    forget: () => {
      takeRemembered();
      setUser(null);
    },
  };
}

// Reads once for each turn.
export function useOnce(read, turn) {
  const [state, setState] = useState({ content: null, problem: null });
  useEffect(() => {
    let isOver = false;
    read().then(
      (content) => isOver || setState({ content, problem: null }),
      (problem) => isOver || setState({ content: null, problem }),
    );
    return () => {
      isOver = true;
    };
  }, [turn]);
  return state;
}
