"""Meaning of every field of a request body, for the OpenAPI document.

A field has one meaning in all dialects, with few exceptions. The structs carry the types and bounds.
"""

from typing import Final

REFUSED: Final = "Refused with 4xx unless it is null: the gateway embeds texts only."
UNSUPPORTED: Final = "Refused with 400 unless it has its default, because the gateway does not apply it."
CUT: Final = "Whether an input longer than the model takes is cut. By default the model's config decides."

FIELDS: Final[dict[str, str]] = {
    "activation": "Older name of `use_activation`.",
    "add_generation_prompt": "Whether the text of a conversation ends with the start of an answer.",
    "add_special_tokens": (
        "Whether the tokenizer adds its special tokens: true by default for texts, false for `messages`."
    ),
    "cache_salt": "Changes nothing.",
    "chat_template": (
        "Template of the request for `messages`: a vLLM upstream decides on it, and any other refuses it."
    ),
    "chat_template_kwargs": (
        "Variables of the chat template for `messages`. Without these it may contain `instruction` only, "
        "which then takes precedence over the field."
    ),
    "completion_window": "`24h`.",
    "content": "The input: one part with a text.",
    "continue_final_message": "Whether the text of a conversation ends with its last message, still open.",
    "data_1": "First side of the pairs: one text or a list.",
    "data_2": "Second side of the pairs: one text or a list.",
    "dimensions": "Width to which vectors are cut. By default the model's own width.",
    "documents": "Texts to score against the query. The gateway's config bounds their number.",
    "embed_dtype": "Number format of packed vectors.",
    "embedContentConfig": "Newer place of the options.",
    "embedding_type": "Number format of the vectors, or a list of formats. It overrides `encoding_format`.",
    "encoding_type": "The same as `embedding_type`.",
    "embedding_types": "Number formats of the vectors; the reply has one list for each.",
    "encoding_format": "`base64` packs the float32 values of a vector, little-endian, into one string.",
    "endianness": "Byte order of packed vectors; `native` is little-endian.",
    "endpoint": "Path of every request in the file: `/v1/embeddings`, `/v2/rerank` or `/score`.",
    "expires": "Day or time, in UTC, at which the key expires. By default it does not expire.",
    "id": "Identifier of the key. By default it is generated.",
    "ids": "Token ids: one list, or a list of lists.",
    "images": "Images as `data:` URIs, instead of texts.",
    "input": "One text or a list of texts. The gateway's config bounds their number.",
    "input_file_id": "File of requests, which was uploaded with the purpose `batch`.",
    "input_type": "Purpose of the inputs, which selects the prompt put before each of them.",
    "inputs": "One text or a list of texts. The gateway's config bounds their number.",
    "instruction": "The task in words, for a model that takes one.",
    "items": "Inputs of the request.",
    "keep_alive": "It changes nothing: the config decides how long a model stays in memory.",
    "late_chunking": (
        "Whether the model reads all inputs as one text and returns a vector for each part of it. "
        "Refused if the model cannot."
    ),
    "late_chunking_params": "Refused unless it is null: each input is one chunk of `late_chunking`.",
    "limits": "Limits of the key, in addition to those of its tenant: name of the limit → amount.",
    "max_chunks_per_doc": UNSUPPORTED,
    "max_doc_length": "Number of tokens to which a document is cut.",
    "max_tokens": "Number of tokens to which an input is cut.",
    "max_tokens_per_doc": "Number of tokens to which a document is cut; 0 is no bound.",
    "max_tokens_per_query": "Number of tokens to which a query is cut; 0 is no bound.",
    "media_io_kwargs": UNSUPPORTED,
    "metadata": "Texts by name that are shown with the batch, at most 16.",
    "messages": (
        "A conversation, or a list of conversations, instead of `input`. The model's chat template turns "
        "each into one text."
    ),
    "mm_processor_kwargs": UNSUPPORTED,
    "modality": "Kind of the inputs: `text`, and `image` or `audio` in the dialect of Infinity.",
    "model": "Public name of the model. It may be left out if the config has a default or the path has it.",
    "name": "Older name of `model`.",
    "models": "Models that the key may call. By default all models of its tenant.",
    "normalize": "Whether vectors are scaled to length 1.",
    "normalized": "Whether vectors are scaled to length 1. By default they are.",
    "options": "Options of the request.",
    "outputDimensionality": "Width to which vectors are cut; 0 is the model's own.",
    "output_dimension": "Width to which vectors are cut. By default the model's own width.",
    "output_dimensionality": "The same as `outputDimensionality`.",
    "output_expires_after": "Time for which the results are kept. By default `batches.keep_s` decides.",
    "output_dtype": "Number format of the vectors.",
    "padding": UNSUPPORTED,
    "parameters": "Options of the request.",
    "params": "Outputs and options of the request.",
    "priority": "0 is interactive; another value is refused.",
    "prompt": "One text.",
    "prompt_name": "Name of a prompt in the model's checkpoint, put before each input.",
    "queries": "First side of the pairs: one text or a list.",
    "query": "Text against which the others are scored.",
    "rank_fields": UNSUPPORTED,
    "raw_scores": "Whether scores are returned as logits, without sigmoid or softmax.",
    "replica": "Address of the replica, as `replicas` of its upstream lists it.",
    "request_id": "Name of the request, which becomes the id of the reply.",
    "requests": "One request for each input, all with the same options.",
    "return_documents": "Whether each result contains the text of its document.",
    "return_embeddings": "Refused if true: a reranker returns scores only.",
    "return_multivector": "Whether one vector is returned for each token instead of one for each input.",
    "return_text": "Whether each result contains its text.",
    "return_token_strs": "Whether the reply contains each token as text.",
    "return_tokenized_input": "Refused if true: `/tokenize` returns the tokens of a text.",
    "scopes": "Groups of paths that the key may call. By default those that compute.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "softmax": "Older name of `use_activation`.",
    "system": "Refused unless it is empty: the gateway has no chat.",
    "task": "Task for which the inputs are embedded, which selects their prompt or the output.",
    "taskType": "Purpose of the input, which selects the prompt put before it.",
    "task_type": "The same as `taskType`.",
    "template": "Refused unless it is empty: the gateway has no chat.",
    "tenant": "Tenant to which the key belongs.",
    "text_1": "First side of the pairs: one text or a list.",
    "text_2": "Second side of the pairs: one text or a list.",
    "texts": "Texts of the request. The gateway's config bounds their number.",
    "title": "Refused unless it is empty: put it in front of the text.",
    "tokens": "Token ids of one text.",
    "top_k": "Number of results to return, as Voyage spells `top_n`.",
    "top_n": "Number of results to return, the best first. By default all of them.",
    "truncate": CUT,
    "truncate_prompt_tokens": "Number of tokens to which an input is cut, from 1; -1 is the model's length.",
    "truncation": CUT,
    "truncation_direction": (
        "End at which an input that is too long is cut. `Left` and `Right` are accepted too."
    ),
    "truncation_side": "End at which an input that is too long is cut.",
    "upstream": "Name of the upstream.",
    "upstreams": "Names of the upstreams whose replicas are compared.",
    "use_activation": (
        "Whether the last activation is applied. False returns logits as scores, and raw vectors."
    ),
    "user": "Name of the end user. It changes nothing.",
    "verbose": "It changes nothing.",
}

NO_CHAT: Final = "Refused unless it is null: this operation reads texts only."
ONLY_INSTRUCTION: Final = "May contain `instruction` only, which then takes precedence over the field."
NORMALIZE: Final = "Refused if false: send `use_activation`."
PACKED: Final = (
    "`base64` packs each vector into one string. `bytes` returns all of them as bytes, which the header "
    "`metadata` describes; `bytes_only` omits it."
)

# Struct.field → meaning, where it differs from that of the same field elsewhere.
OWN_FIELDS: Final[dict[str, str]] = {
    "CreateInstance.device": "Device of the model, such as `cpu` or `cuda:0`.",
    "CreateInstance.extra_args": "Further arguments, if the command's template has a place for them.",
    "CreateInstance.gpu_id": "Number of the GPU: for an engine the device `cuda:<number>`.",
    "CreateInstance.kind": "`engine`, or a name among `manager.commands`; by default `manager.kind`.",
    "CreateInstance.max_batch_tokens": "Most tokens of one batch.",
    "CreateInstance.max_concurrent_requests": (
        "For a command; an engine ignores it, because the gateway's queue bounds its requests."
    ),
    "CreateInstance.model_id": "Hub id, or path of a folder below `admin.files`.",
    "CreateInstance.name": "Name of the instance, and of its model unless it joins an upstream.",
    "CreateInstance.pooling": "Pooling of an embedding model.",
    "CreateInstance.port": "Port of a command's server on the loopback interface; absent, a free one.",
    "CreateInstance.prometheus_port": "Port of a command's own metrics.",
    "CreateInstance.startup_timeout_secs": "Time after which an instance that is not ready has failed.",
    "CreateInstance.upstream": "Upstream that the instance joins; absent, one of its own name.",
    "CountTokensRequest.generateContentRequest": REFUSED,
    "CountTokensRequest.systemInstruction": REFUSED,
    "CountTokensRequest.tools": REFUSED,
    "CountTokensRequest.generationConfig": REFUSED,
    "CountTokensRequest.contents": "Texts whose tokens are counted and added.",
    "EmbedContentRequest.model": "The model in the path, if it is there.",
    "EmbedV1Request.truncate": "End at which an input that is too long is cut; `NONE` refuses it instead.",
    "EmbedV2Request.truncate": "End at which an input that is too long is cut; `NONE` refuses it instead.",
    "EmbedV2Request.inputs": "Inputs in parts, each of one text; instead of `texts`.",
    "EmbedV2Request.priority": "0, the default, is interactive; any other value is bulk.",
    "EitherRerankRequest.priority": "0, the default, is interactive; any other value is bulk.",
    "RankingRequest.passages": "Texts to rank.",
    "RankingRequest.query": "Text that they are compared with.",
    "RankingRequest.truncate": "End at which an input that is too long is cut; `NONE` refuses it instead.",
    "RerankRequest.priority": "0, the default, is interactive; any other value is bulk.",
    "MultimodalRequest.inputs": "Inputs, each of texts and images.",
    "MultimodalRequest.input_type": "Purpose of the inputs, which selects the prompt put before a text.",
    "MultimodalRequest.output_encoding": "`base64` packs each vector into one string.",
    "OllamaEmbedRequest.dimensions": "Width to which vectors are cut; 0 is the model's own.",
    "OllamaEmbedRequest.options": "Only `num_ctx`, the most tokens of an input, has an effect.",
    "OllamaEmbeddingsRequest.options": "Only `num_ctx`, the most tokens of the text, has an effect.",
    "OllamaShowRequest.options": "They change nothing.",
    "InfinityEmbeddingsRequest.dimensions": "Width to which vectors are cut; 0 is the model's own.",
    "InfinityEmbeddingsRequest.output_dimension": "The same as `dimensions`, as LiteLLM's client spells it.",
    "OpenAIEmbeddingsRequest.input": (
        "One text or a list of texts; or token ids, if the model's config specifies their vocabulary. "
        "The gateway's config bounds their number."
    ),
    "OpenAIEmbeddingsRequest.truncate": (
        "Whether an input longer than the model takes is cut, or the end at which it is cut; "
        "`NONE` refuses it instead."
    ),
    "OpenAIEmbeddingsRequest.encoding_format": PACKED,
    "OpenAIEmbeddingsRequest.normalize": NORMALIZE,
    "PoolingRequest.encoding_format": PACKED,
    "PoolingRequest.normalize": NORMALIZE,
    "RerankRequest.normalize": NORMALIZE,
    "EitherRerankRequest.normalize": NORMALIZE,
    "VllmClassifyRequest.normalize": NORMALIZE,
    "VllmScoreRequest.normalize": NORMALIZE,
    "PoolingRequest.dimensions": "Refused unless it is null.",
    "PoolingRequest.task": "Output of the model. By default the model's own.",
    "SieEncodeRequest.input": "Alias of `items`.",
    "SieEncodeRequest.inputs": "Alias of `items`.",
    "SieScoreRequest.items": "Texts to score against the query.",
    "SimilarityRequest.inputs": "One sentence, and the sentences to compare it with.",
    "VllmScoreRequest.documents": "Second side of the pairs: one text or a list.",
    "VllmScoreRequest.items": "Second side of the pairs: one text or a list.",
    "EitherRerankRequest.add_generation_prompt": NO_CHAT,
    "EitherRerankRequest.chat_template": NO_CHAT,
    "EitherRerankRequest.continue_final_message": NO_CHAT,
    "EitherRerankRequest.messages": NO_CHAT,
    "RerankRequest.add_generation_prompt": NO_CHAT,
    "RerankRequest.chat_template": NO_CHAT,
    "RerankRequest.continue_final_message": NO_CHAT,
    "RerankRequest.messages": NO_CHAT,
    "VllmScoreRequest.add_generation_prompt": NO_CHAT,
    "VllmScoreRequest.chat_template": NO_CHAT,
    "VllmScoreRequest.continue_final_message": NO_CHAT,
    "VllmScoreRequest.messages": NO_CHAT,
    "EitherRerankRequest.chat_template_kwargs": ONLY_INSTRUCTION,
    "RerankRequest.chat_template_kwargs": ONLY_INSTRUCTION,
    "VllmScoreRequest.chat_template_kwargs": ONLY_INSTRUCTION,
    "EitherRerankRequest.add_special_tokens": "Refused if false.",
    "RerankRequest.add_special_tokens": "Refused if false.",
    "VllmScoreRequest.add_special_tokens": "Refused if false.",
    "RegisterModel.model_id": "Id of the model at the Hub.",
    "SignInCode.name": "Name of the issuer in `sign_on`.",
    "SignInCode.code": "Code that the issuer has added to the address of the page.",
    "SignInCode.code_verifier": "Verifier of PKCE, whose digest began the sign-in.",
    "SignInCode.nonce": "Nonce that began the sign-in; the ID token has it too.",
    "SignInCode.redirect_uri": "Address that the issuer has sent the user back to.",
    "VertexRequest.instances": "Bodies of `POST /`, each of which gets one prediction.",
    "DefaultRequest.inputs": "Texts, or for similarity one sentence and the sentences to compare it with.",
}
