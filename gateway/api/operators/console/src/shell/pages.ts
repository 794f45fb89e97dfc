// The pages of the console, in the order of the sidebar, each with who can open it.
import type { ComponentType } from "preact";
import {
  Activity,
  BookOpenText,
  Boxes,
  Building2,
  FlaskConical,
  FolderClock,
  Gauge,
  type IconNode,
  KeyRound,
  Network,
  ScrollText,
  Server,
  UserRound,
} from "lucide";
import { Audit } from "../pages/audit/audit.tsx";
import { Batches } from "../pages/batches/batches.tsx";
import { Calls } from "../pages/calls/calls.tsx";
import { Fleet } from "../pages/fleet/fleet.tsx";
import { Keys } from "../pages/keys/keys.tsx";
import { Models } from "../pages/models/models.tsx";
import { MyKey } from "../pages/my-key/my-key.tsx";
import { Overview } from "../pages/overview/overview.tsx";
import { Playground } from "../pages/playground/playground.tsx";
import { Tenants } from "../pages/tenants/tenants.tsx";
import { Upstreams } from "../pages/upstreams/upstreams.tsx";

export interface ConsolePage {
  // In the address.
  name: string;
  title: string;
  icon: IconNode;
  group: "Observe" | "Manage" | "Use";
  show: ComponentType;
  // Its content comes from /admin.
  isForOperators?: boolean;
  // A key needs one of them.
  scopes?: string[];
}

export const PAGES: ConsolePage[] = [
  { name: "overview", title: "Overview", icon: Gauge, group: "Observe", show: Overview, isForOperators: true },
  { name: "calls", title: "Recent calls", icon: Activity, group: "Observe", show: Calls, isForOperators: true },
  { name: "fleet", title: "Fleet", icon: Network, group: "Observe", show: Fleet, isForOperators: true },
  { name: "audit", title: "Audit", icon: ScrollText, group: "Observe", show: Audit, isForOperators: true },
  { name: "tenants", title: "Tenants", icon: Building2, group: "Manage", show: Tenants, isForOperators: true },
  { name: "keys", title: "Keys", icon: KeyRound, group: "Manage", show: Keys, isForOperators: true },
  { name: "models", title: "Models", icon: Boxes, group: "Manage", show: Models, isForOperators: true },
  { name: "upstreams", title: "Upstreams", icon: Server, group: "Manage", show: Upstreams, isForOperators: true },
  { name: "batches", title: "Batches", icon: FolderClock, group: "Use", show: Batches },
  { name: "playground", title: "Playground", icon: FlaskConical, group: "Use", show: Playground, scopes: ["embed", "rerank"] },
  { name: "usage", title: "My key", icon: UserRound, group: "Use", show: MyKey },
];

export const API_ICON = BookOpenText;
