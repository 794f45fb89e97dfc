// Kinds of errors by who has to act: refusals by limits and mistakes of callers are no trouble of the gateway.
const REFUSALS = new Set(["quota_exceeded", "request_exceeds_limit"]);
const CALLERS = new Set(
  (
    "invalid_input empty_input malformed_body body_too_large unsupported_media unauthenticated auth_throttled " +
    "model_forbidden scope_forbidden tenant_unknown model_not_found not_found method_not_allowed already_exists " +
    "precondition_failed instance_not_found instance_invalid instance_running operation_unsupported cancelled"
  ).split(" "),
);

export type FailureClass = "refused" | "caller" | "gateway";

export function failureClass(kind: string): FailureClass {
  if (REFUSALS.has(kind)) return "refused";
  return CALLERS.has(kind) ? "caller" : "gateway";
}
