// The shell: who may see which page, the sidebar, and the page that the address names.
import { useEffect, useState } from "preact/hooks";
import { go, useRoute } from "../lib/route.ts";
import { useSession } from "../lib/session.ts";
import { StatusContext, useStatusSource } from "../lib/status.ts";
import { Skeleton } from "../ui/states.tsx";
import { Toasts } from "../ui/toast.tsx";
import { AccessContext, useAccessSource } from "./access.ts";
import { Banner } from "./banner.tsx";
import { PAGES } from "./pages.ts";
import { Sidebar } from "./sidebar.tsx";
import { SignIn } from "./sign-in.tsx";
import { useSignOn } from "./sign-on.ts";

const OWN = "usage";

function useShell() {
  const session = useSession();
  const signOn = useSignOn();
  const status = useStatusSource();
  // With a key that is for no operator, and on an address without their paths.
  const isRefused = status.problem?.status === 403 || (session.hasKey && status.problem?.status === 404);
  const access = useAccessSource(isRefused);
  const { isDenied } = access;
  const route = useRoute();
  const pages = PAGES.filter(({ isForOperators }) => !(isForOperators && isDenied)).filter(
    ({ scopes }) => !scopes || !access.scopes || scopes.some((scope) => access.scopes?.includes(scope)),
  );
  const isKnown = (status.snapshot !== null || status.problem !== null) && (!session.hasKey || access.isRead);
  return { session, signOn, status, isDenied, access, route, pages, isKnown };
}

function whoOf({ access, signOn, session }: ReturnType<typeof useShell>) {
  if (signOn.user) return `${signOn.user.key}, ${signOn.user.tenant}`;
  if (access.tenant) return access.tenant;
  return session.hasKey ? "Signed in" : "This machine, without a key";
}

export function App() {
  const shell = useShell();
  const { session, signOn, status, isDenied, access, route, pages, isKnown } = shell;
  const [isAsking, setAsking] = useState(false);
  const name = route.page || (isDenied ? OWN : "overview");
  const page = PAGES.find((known) => known.name === name);
  const isOffered = page !== undefined && pages.includes(page);
  useEffect(() => {
    if (isKnown && !isOffered) go(`#/${isDenied ? OWN : "overview"}`);
  }, [isKnown, isOffered, isDenied]);
  // A refused key leads back to the sign-in screen, which shows the reason.
  useEffect(() => setAsking(!session.hasKey && session.reason !== ""), [session.turn]);
  const needsKey = !session.hasKey && status.problem?.status === 401;
  if (needsKey || isAsking) {
    return <SignIn signOn={signOn} onCancel={needsKey ? undefined : () => setAsking(false)} />;
  }
  const Content = page?.show;
  return (
    <StatusContext.Provider value={status}>
      <AccessContext.Provider value={access}>
        <a
          class="skip"
          href="#content"
          onClick={(event) => {
            event.preventDefault();
            document.querySelector<HTMLElement>("h1")?.focus();
          }}
        >
          Skip to the content
        </a>
        <div class="frame">
          <Sidebar
            pages={pages}
            current={name}
            who={whoOf(shell)}
            hasKey={session.hasKey}
            onSignIn={() => setAsking(true)}
            onSignOut={signOn.signOut}
          />
          <main id="content">
            {page?.isForOperators && <Banner />}
            {isKnown && isOffered && Content ? (
              <Content key={`${session.turn} ${name} ${route.rest.join("/")}`} />
            ) : (
              <Skeleton rows={5} height={40} />
            )}
          </main>
        </div>
        <Toasts />
      </AccessContext.Provider>
    </StatusContext.Provider>
  );
}
