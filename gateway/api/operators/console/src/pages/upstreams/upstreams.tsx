// Upstreams: all of them, or the one in the address.
import { useRoute } from "../../lib/route.ts";
import { AllUpstreams } from "./all-upstreams.tsx";
import { UpstreamPage } from "./upstream-page.tsx";

export function Upstreams() {
  const [name] = useRoute().rest;
  return name === undefined ? <AllUpstreams /> : <UpstreamPage name={name} />;
}
