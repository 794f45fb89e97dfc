"""Settings that the application of one worker is built from."""

from collections.abc import Mapping

import msgspec

from gateway.config.schema import Config


class AppBoot(msgspec.Struct, frozen=True):
    """Settings that one worker's application is built from.

    first_key_digest: digest of the key that is valid while no tenant is configured; empty until a gateway has
    created it. first_key_waits: Redis was unavailable at start and may hold tenants, in which case the first
    key is not valid. first_key_is_kept: all gateways of the store agree on it by its digest there. engines:
    upstream name → addresses of its model in engines, by `UpstreamSettings.devices`. added_models: models
    that are not in the file. admin_port, manager_port: ports of these listeners, if they exist. worker: index
    of this worker; None if there is only one. tenants_file: of tenants and keys where there is no Redis, None
    if no folder for it is known. jobs_file: of the table of batches where there is no Redis; None puts it
    into `batches.dir`.
    """

    config: Config
    first_key_digest: str | None = None
    first_key_waits: bool = False
    first_key_is_kept: bool = False
    engines: Mapping[str, Mapping[str, str]] = {}
    added_models: frozenset[str] = frozenset()
    admin_port: int | None = None
    manager_port: int | None = None
    worker: int | None = None
    tenants_file: str | None = None
    jobs_file: str | None = None
