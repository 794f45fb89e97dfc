"""Positions of networks by their `model_type`: tables of how many there are, and how they are stated."""

# RoBERTa's family starts positions after the padding index, therefore two of its positions hold no token.
OFFSET_POSITIONS = dict.fromkeys(
    (
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
    2,
)
# Names of `max_position_embeddings` by `model_type`. Source: `attribute_map` of the configurations.
POSITION_KEYS = {
    **dict.fromkeys(
        ("codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "imagegpt", "openai-gpt"), "n_positions"
    ),
    "mpt": "max_seq_len",
    "rwkv": "context_length",
}
# Positions of a network whose config.json does not state them, by `model_type`: defaults of transformers.
DEFAULT_POSITIONS = {
    **dict.fromkeys(
        (
            *("albert", "bert", "bert-generation", "camembert", "convbert", "data2vec-text", "deberta"),
            *("deberta-v2", "distilbert", "electra", "ernie", "flaubert", "fnet", "ibert", "longformer"),
            *("luke", "megatron-bert", "mobilebert", "mpnet", "mra", "openai-gpt", "rembert", "roberta"),
            *("roberta-prelayernorm", "squeezebert", "xlm", "xlm-roberta", "xmod"),
        ),
        512,
    ),
    **dict.fromkeys(("bart", "biogpt", "gpt2", "gpt_bigcode", "mbart", "mvp", "plbart"), 1024),
    **dict.fromkeys(("codegen", "gpt_neo", "gptj", "opt"), 2048),
    **dict.fromkeys(("big_bird", "bigbird_pegasus", "yoso"), 4096),
    "ctrl": 256,
    "esm": 1026,
    "nystromformer": 510,
    "xlm-roberta-xl": 514,
}
# Types of networks that have a table of positions only where `position_biased_input` is true, as it is by
# default.
DEBERTA_TYPES = frozenset({"deberta", "deberta-v2"})
# Keys of networks that compute positions, and so have no table that ends.
ROTARY_KEYS = frozenset({"rope_theta", "rope_parameters", "rope_scaling", "global_rope_theta"})
COMPUTED_POSITIONS = frozenset({"rope", "rotary", "alibi"})
