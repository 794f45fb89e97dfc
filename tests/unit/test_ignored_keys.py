"""Keys of an upstream that have no effect on its backend."""

from pathlib import Path

from gateway.config.load import parse_config
from gateway.config.notes import ignored_keys

TEI = "upstreams: {t: {backend: tei, replicas: ['http://t:1'], pooling: mean, dtype: int8, preload: false}}"
TORCH = "upstreams: {t: {backend: torch, model: acme/model, pooling: mean, dtype: int8, preload: false}}"


MODELS = '\nmodels: {t: {upstream: t}}\ntenants: {a: {keys: ["sha256:' + 64 * "0" + '"]}}'


def test_keys_of_the_engine_have_no_effect_on_a_server() -> None:
    found = {problem.path for problem in ignored_keys(parse_config(TEI + MODELS, {}, Path.cwd()))}

    assert found == {"upstreams.t.pooling", "upstreams.t.dtype", "upstreams.t.preload"}
    assert not list(ignored_keys(parse_config(TORCH + MODELS, {}, Path.cwd())))
