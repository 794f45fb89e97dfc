// Tenants: the list of all, or the page of one.
import { useRoute } from "../../lib/route.ts";
import { TenantList } from "./tenant-list.tsx";
import { TenantPage } from "./tenant-page.tsx";

export function Tenants() {
  const [name] = useRoute().rest;
  return name === undefined ? <TenantList /> : <TenantPage name={name} />;
}
