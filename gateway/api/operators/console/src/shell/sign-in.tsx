// The screen before a key: typed, or given by an issuer.
import { useState } from "preact/hooks";
import { KeyRound, LogIn } from "lucide";
import { setKey, useSession } from "../lib/session.ts";
import { canSignIn } from "../lib/sign-on.ts";
import { Button } from "../ui/button.tsx";
import { TextField } from "../ui/field.tsx";
import { Problem } from "../ui/states.tsx";
import { Logo } from "./logo.tsx";
import type { SignOn } from "./sign-on.ts";

export function SignIn({ signOn, isBusy, onCancel }: { signOn: SignOn; isBusy?: boolean; onCancel?: () => void }) {
  const { reason } = useSession();
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const submit = () => {
    const key = text.trim();
    if (!key) setProblem("Type or paste an API key.");
    else if (!/^[!-~]+$/.test(key)) setProblem("A key is of plain letters, digits and signs, without spaces.");
    else {
      setProblem("");
      setKey(key);
      onCancel?.();
    }
  };
  return (
    <main class="sign-in" id="sign-in">
      <form
        class="card"
        autocomplete="off"
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          submit();
        }}
      >
        <Logo size={40} />
        <h1>Sign in</h1>
        <p class="note">Operators see the whole gateway with a key of scope admin or admin:read; every key sees its own usage.</p>
        {reason && <Problem id="sign-in-problem">{reason}</Problem>}
        <TextField
          label="API key"
          type="password"
          value={text}
          onInput={setText}
          autoFocus
          error={problem}
          hint="Kept for this tab until it is closed or you sign out. It is sent to this gateway only."
        />
        <Button kind="primary" type="submit" icon={KeyRound} busy={isBusy}>
          Sign in
        </Button>
        {signOn.offers.map((offer) => (
          <Button
            key={offer.name}
            icon={LogIn}
            disabled={!canSignIn() || !offer.authorization_endpoint}
            onClick={() => signOn.signIn(offer)}
          >
            Sign in with {offer.name}
          </Button>
        ))}
        {!canSignIn() && signOn.offers.length > 0 && <p class="note">A sign-in by an issuer needs HTTPS.</p>}
        {signOn.offers.some((offer) => !offer.authorization_endpoint) && (
          <p class="note">An issuer cannot be reached now.</p>
        )}
        <Problem id="sign-on-problem">{signOn.problem}</Problem>
        {onCancel && (
          <Button kind="ghost" onClick={onCancel}>
            Back
          </Button>
        )}
        <p class="note">
          <a href="/docs">Documentation of the API</a>
        </p>
      </form>
    </main>
  );
}
