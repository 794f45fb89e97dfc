// Sign-in by an issuer, as state of the shell: the offers of the gateway, and the user who has signed in.
import { useEffect, useState } from "preact/hooks";
import { RequestError, send } from "../lib/api.ts";
import { setKey } from "../lib/session.ts";
import * as issuer from "../lib/sign-on.ts";

// Of setTimeout, whose milliseconds are 32 bits.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

export interface SignOn {
  offers: issuer.Offer[];
  user: issuer.User | null;
  problem: string;
  signIn: (offer: issuer.Offer) => void;
  // Forgets the key or the token, and ends the issuer's session where it offers that.
  signOut: () => void;
}

export function useSignOn(): SignOn {
  const [offers, setOffers] = useState<issuer.Offer[]>([]);
  const [user, setUser] = useState<issuer.User | null>(null);
  const [problem, setProblem] = useState("");
  const attempt = async (action: () => Promise<void> | void) => {
    try {
      await action();
    } catch (error) {
      if (!(error instanceof RequestError)) console.error(error);
      setProblem(error instanceof RequestError ? error.message : "this browser cannot sign in");
    }
  };
  useEffect(() => {
    attempt(async () => {
      const signedIn = await issuer.complete();
      const remembered = issuer.takeRemembered();
      if (signedIn) {
        issuer.remember(signedIn.name);
        setUser(signedIn);
        setKey(signedIn.token, "", false);
      }
      const { content } = await send<{ data: issuer.Offer[] }>("/ui/sign-on");
      setOffers(content.data);
      const again = content.data.find(({ name }) => name === remembered);
      if (!signedIn && again?.authorization_endpoint && issuer.canSignIn()) await issuer.begin(again, location.hash);
    });
  }, []);
  useEffect(() => {
    if (!user) return undefined;
    const timer = setTimeout(
      () => {
        setUser(null);
        setKey("", "Your sign-in has expired; sign in again.");
      },
      Math.min(user.expires_in_s * 1000, LONGEST_TIMER_MS),
    );
    return () => clearTimeout(timer);
  }, [user]);
  return {
    offers,
    user,
    problem,
    signIn: (offer) => void attempt(() => issuer.begin(offer, location.hash)),
    signOut: () =>
      void attempt(() => {
        const offer = user ? offers.find(({ name }) => name === user.name) : undefined;
        issuer.takeRemembered();
        setUser(null);
        setProblem("");
        setKey("");
        if (user) issuer.signOut(offer);
      }),
  };
}
