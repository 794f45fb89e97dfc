import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { RequestError } from "./api.js";

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
