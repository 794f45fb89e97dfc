// Replies of /admin/tenants and /admin/keys, as gateway/api/operators/{tenants,directory,summary,keys}.py declare them.
export type Limits = Record<string, number>;

export interface Settings {
  // Null allows all.
  models: string[] | null;
  limits: Limits;
  model_limits: Record<string, Limits>;
  end_user_limits: Limits;
  weight: number;
  priority: "interactive" | "bulk";
  queue_tokens: number | null;
  join: boolean;
  certificates: string[];
}

export interface StoredTenant {
  name: string;
  settings: Settings;
  in_file: boolean;
  etag: string;
  notes: string[];
}

export interface Today {
  calls: number;
  tokens: number;
  cost: number;
  refused: number;
}

// used, of: in the currency for a budget. share: from 0 to 1.
export interface UsedLimit {
  limit: string;
  used: number;
  of: number;
  share: number;
}

export interface TenantRow {
  name: string;
  in_file: boolean;
  etag: string | null;
  models: string[] | null;
  limits: Limits;
  model_limits: Record<string, Limits>;
  weight: number;
  priority: string;
  keys: number;
  // A day in UTC.
  last_used: string | null;
  today: Today;
  month: { cost: number; tokens: number; calls: number };
  most_used: UsedLimit | null;
  notes: string[];
}

export interface TenantPage {
  data: TenantRow[];
  total: number;
  currency: string | null;
}

export interface LimitState extends UsedLimit {
  remaining: number;
  resets_at_s: number;
}

export interface Key {
  id: string;
  tenant: string;
  // Seconds since 1970.
  expires: number | null;
  // Null: all operations.
  scopes: string[] | null;
  models: string[] | null;
  limits: Limits;
  has_tenant: boolean;
  created: number | null;
  created_by: string | null;
  // A day in UTC.
  last_used: string | null;
  successor: string | null;
  source: "store" | "file" | "operators";
}

export interface CreatedKey {
  key: string;
  shown: Key;
  notes: string[];
}

export interface Summary {
  name: string;
  in_file: boolean;
  // Null if it is not stored.
  etag: string | null;
  settings: Settings;
  key_count: number;
  limits: LimitState[];
  today: Today;
  month: { cost: number; tokens: number; calls: number; forecast: { cost: number; tokens: number; requests: number } | null };
  by_model: { model: string; calls: number; tokens: number; cost: number }[];
  currency: string | null;
  notes: string[];
}
