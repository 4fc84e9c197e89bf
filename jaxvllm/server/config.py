"""ServerConfig: everything a user may choose about the server around an engine, validated once, never changed."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve. Names and meaning are vLLM's where vLLM has them."""

    host: str = "127.0.0.1"  # 0.0.0.0: every network of this host; then set an api_key
    port: int = 8000  # 0: any free one, which is printed
    served_model_name: tuple[str, ...] = ()  # what clients may call the model, the first in answers; (): its own name
    api_key: tuple[str, ...] = field(default=(), repr=False)  # keys that clients may use, beside $JAXVLLM_API_KEY
    api_key_file: str | None = None  # one key a line; lines that begin with # are comments
    allowed_host: tuple[str, ...] = ()  # names beside localhost that clients may use while there is no key, or "*"
    open_metrics: bool = False  # /metrics without a key
    max_num_queued_requests: int | None = None  # requests beyond those that can run; more get 503. None: no limit
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting requests; more get 503. None: no limit
    request_timeout: float = 600.0  # seconds a request may take in all
    shutdown_timeout: float = 30.0  # seconds for running requests to finish after SIGTERM
    max_body_bytes: int = 8 * 2**20  # of a request, before it is parsed
    metrics_prefix: str = "jaxvllm"  # vllm: dashboards made for vLLM work
    log_stats_interval: float = 10.0  # seconds between log lines while there is work
    access_log: bool = False  # a log line for each HTTP request
    enable_tokenizer_info_endpoint: bool = False  # GET /tokenizer_info: the tokenizer's settings and the chat template
    dev_endpoints: bool = False  # adds POST /reset_prefix_cache, which measurements use to empty the cache
    ssl_certfile: str | None = None  # with ssl_keyfile: https
    ssl_keyfile: str | None = None  # the private key of ssl_certfile

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port!r}")
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be an integer of 0 or more, or None, not {value!r}")
        for name in ("request_timeout", "shutdown_timeout", "log_stats_interval"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be positive, not {self.max_body_bytes!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together: give both, or none")
        for name in ("served_model_name", "api_key", "allowed_host"):
            if not all(getattr(self, name)):
                raise ValueError(f"{name} has an empty one: leave it out")
