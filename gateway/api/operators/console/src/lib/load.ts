// Reading from the gateway: once, or again and again while the page is visible.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { RequestError } from "./api.ts";
import { useSession } from "./session.ts";

export interface Loaded<T> {
  // Null until it is read. It stays while the gateway does not answer.
  content: T | null;
  problem: RequestError | null;
  // Seconds since 1970 of the content.
  atS: number | null;
  reload: () => void;
}

// What is read seldom is asked for again sooner after a failure.
const RETRY_MS = 30_000;

const asFailure = (error: unknown) =>
  error instanceof RequestError ? error : new RequestError(0, "this page does not understand the reply");

// Calls `read` at each interval while the page is visible; once if the interval is null. subject: another value discards
// what was read. A reply of 4xx ends it, because the gateway throttles addresses that keep sending a wrong key.
export function useLoad<T>(read: () => Promise<T>, intervalMs: number | null, subject = ""): Loaded<T> {
  const { turn } = useSession();
  const identity = `${turn} ${subject}`;
  const [state, setState] = useState<Omit<Loaded<T>, "reload"> & { identity: string }>({
    content: null,
    problem: null,
    atS: null,
    identity,
  });
  const latest = useRef(read);
  latest.current = read;
  const step = useRef(() => {});
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isOver = false;
    let isRefused = false;
    let isRunning = false;
    let hasFailed = false;
    async function run() {
      clearTimeout(timer);
      if (isOver || isRefused || isRunning) return;
      if (!document.hidden) {
        isRunning = true;
        try {
          const content = await latest.current();
          if (!isOver) setState({ content, problem: null, atS: Date.now() / 1000, identity });
          hasFailed = false;
        } catch (error) {
          hasFailed = true;
          if (!(error instanceof RequestError)) console.error(error);
          const problem = asFailure(error);
          isRefused = problem.status >= 400 && problem.status < 500 && problem.status !== 429;
          if (!isOver) {
            setState((before) =>
              before.identity === identity && !isRefused
                ? { ...before, problem }
                : { content: null, problem, atS: null, identity },
            );
          }
        }
        isRunning = false;
      }
      if (intervalMs !== null && !isOver) timer = setTimeout(run, hasFailed ? Math.min(intervalMs, RETRY_MS) : intervalMs);
    }
    const wake = () => void (document.hidden || run());
    step.current = () => {
      isRefused = false;
      run();
    };
    document.addEventListener("visibilitychange", wake);
    run();
    return () => {
      isOver = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
    };
  }, [intervalMs, identity]);
  const reload = useCallback(() => step.current(), []);
  if (state.identity !== identity) return { content: null, problem: null, atS: null, reload };
  return { ...state, reload };
}

export interface Action<A extends unknown[], T> {
  busy: boolean;
  problem: RequestError | null;
  outcome: T | null;
  // Returns the outcome, or null after a failure.
  run: (...subject: A) => Promise<T | null>;
  reset: () => void;
}

// What a form or a button does: busy while it runs, its outcome or problem afterwards. A second click waits for the first.
export function useAction<A extends unknown[], T>(action: (...subject: A) => Promise<T>): Action<A, T> {
  const [state, setState] = useState<{ busy: boolean; problem: RequestError | null; outcome: T | null }>({
    busy: false,
    problem: null,
    outcome: null,
  });
  const latest = useRef(action);
  latest.current = action;
  const isBusy = useRef(false);
  const run = useCallback(async (...subject: A) => {
    if (isBusy.current) return null;
    isBusy.current = true;
    setState((before) => ({ ...before, busy: true }));
    try {
      const outcome = await latest.current(...subject);
      setState({ busy: false, problem: null, outcome });
      return outcome;
    } catch (error) {
      if (!(error instanceof RequestError)) console.error(error);
      setState({ busy: false, problem: asFailure(error), outcome: null });
      return null;
    } finally {
      isBusy.current = false;
    }
  }, []);
  const reset = useCallback(() => setState({ busy: false, problem: null, outcome: null }), []);
  return { ...state, run, reset };
}
