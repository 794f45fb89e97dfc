// Kinds of errors of calls: what each means, and what an operator does about it. docs/errors.md has their statuses.
export interface ErrorKind {
  means: string;
  advice: string;
}

const OWN = "Nothing to do here: the caller has to correct the request. The reply names the field.";
const kind = (means: string, advice = OWN): ErrorKind => ({ means, advice });

export const ERROR_KINDS: Record<string, ErrorKind> = {
  invalid_input: kind("The value of a field is wrong."),
  empty_input: kind("A list or a string is empty."),
  malformed_body: kind("The body is not JSON, not UTF-8, or nested too deeply."),
  request_exceeds_limit: kind(
    "This one request costs more than a limit ever allows.",
    "Have the caller send fewer inputs at a time, or raise the limit of the tenant.",
  ),
  body_too_large: kind(
    "The body is larger than limits.body_bytes.",
    "Have the caller split the request, or raise limits.body_bytes in router.yaml.",
  ),
  unsupported_media: kind("The body is compressed.", "Have the caller send it without compression."),
  unauthenticated: kind(
    "There was no valid key, token or certificate.",
    "Look for the key on the page Keys: it may be revoked, expired or mistyped. Make another one if it is lost.",
  ),
  auth_throttled: kind(
    "Too many wrong keys came from this address. A valid key passes all the same.",
    "Find the client that keeps sending a wrong key, and replace its key.",
  ),
  model_forbidden: kind(
    "The key may not use this model.",
    "Add the model to the key or to its tenant if the caller should use it.",
  ),
  scope_forbidden: kind(
    "The key is valid, but not for this operation.",
    "Make a key with the scope of the operation if the caller should use it.",
  ),
  tenant_unknown: kind("The tenant of the key is not defined.", "Define the tenant on the page Tenants, or revoke the key."),
  model_not_found: kind(
    "There is no model of that name.",
    "Add the name on the page Models if it should be served; it may be a misspelling, or a model that was removed.",
  ),
  not_found: kind("There is no such path, or no such object.", "Check the path of the client: /docs lists all of them."),
  method_not_allowed: kind("The path is served with another method.", "Check the method of the client: /docs lists it."),
  already_exists: kind("The name or id is taken.", "Choose another one, or change what is there."),
  precondition_failed: kind(
    "The object was changed since it was read.",
    "Read it again, and repeat the change if it is still wanted.",
  ),
  instance_not_found: kind("There is no instance of this name.", "See the page Models for the instances of this host."),
  instance_invalid: kind("An instance cannot have these settings.", "Correct the setting that the reply names."),
  instance_running: kind("The instance runs already.", "Stop it first, or leave it as it is."),
  operation_unsupported: kind(
    "The model does not support the operation.",
    "Have the caller use another model: the page Models lists the operations of each.",
  ),
  quota_exceeded: kind(
    "A limit of the tenant, the key or the model is used up.",
    "See the limits and usage of the tenant. Raise the limit, or have the caller wait as retry-after says.",
  ),
  overloaded: kind(
    "Too much is waiting for this model, or its replicas are full.",
    "See the queue on the page Upstreams. Add a replica, or limit the tenants that send most.",
  ),
  gateway_full: kind(
    "Bodies and replies use all memory for them, or the share of the tenant.",
    "Raise limits.in_flight_bytes, add a gateway, or have the caller send less at a time.",
  ),
  no_replica: kind(
    "No replica of the model can be reached.",
    "See the reason of each replica on the page Upstreams, and start its server again.",
  ),
  quota_unavailable: kind(
    "The quota store is unavailable, and the configuration refuses calls then.",
    "Check Redis: its address, its memory, and the network between.",
  ),
  sign_on_unavailable: kind(
    "The keys of an issuer are not known, or a sign-in could not be completed.",
    "Check that the gateway reaches the issuer of sign_on.",
  ),
  shutting_down: kind("The gateway was stopping.", "Drain a gateway before you stop it, so that no call meets this."),
  model_loading: kind(
    "The model was not in memory yet.",
    "Wait until it is loaded. Keep it in memory if callers should not wait: see keep_alive_s.",
  ),
  upstream_failed: kind(
    "A replica failed, and no other could take over.",
    "Read its status and words below, then the log of its server.",
  ),
  deadline_exceeded: kind(
    "The deadline of the model or of the caller passed.",
    "See which stage took the time. Queue: add a replica. Upstream: it is slow, or the inputs are long.",
  ),
  model_download_failed: kind("A model could not be downloaded.", "See the reason on the page Models."),
  model_load_failed: kind("A model could not be loaded.", "See the reason on the page Models."),
  file_storage_full: kind(
    "Files of batches have no room for more.",
    "Raise batches.bytes or batches.tenant_bytes, or have the tenant delete files.",
  ),
  batches_unavailable: kind("Files and batches cannot be used now.", "See the log of the gateway for the reason."),
  instances_unavailable: kind("Instances cannot be changed now.", "See the log of the gateway for the reason."),
  internal: kind("This is a fault of the gateway itself.", "Find the request id in the log of the gateway, and report it."),
  cancelled: kind(
    "The caller closed the connection before the reply was sent.",
    "See which stage took the time: the time limit of the client may be too short.",
  ),
};

const UNKNOWN = kind("This page does not know this kind of error.", "Find the request id in the log of the gateway.");

export const errorKind = (outcome: string): ErrorKind => ERROR_KINDS[outcome] ?? UNKNOWN;
