"""How to reach each cloud's buckets, as its users expect it: which options, whose credentials, which address.

obstore itself reads the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) and Google's key files. Found here is what
it does not know: the files of the AWS command line, connection strings, logins that need a library, and what servers
hand out on a cloud's own machines (see `SharedCredential`).
"""

from __future__ import annotations

import configparser
import contextlib
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import orjson

from shardset.errors import AccessError, MissingExtraError

from .credentials import SharedCredential, ask_json, read_token, send

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .credentials import Fetched

_AWS_METADATA: Final = "http://169.254.169.254"
_AZURE_METADATA: Final = "http://169.254.169.254/metadata/identity/oauth2/token"
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a bucket.

    Attributes:
        config: obstore's options.
        provider: Gives a credential that expires; None where obstore needs none or finds its own.
        endpoint: Where requests go, if that is not the cloud's own address.
    """

    config: dict[str, str] = field(repr=False)
    provider: SharedCredential | None = None
    endpoint: str | None = None


def s3_access(options: Mapping[str, str]) -> Access:
    """Find out how to reach S3, in the order of the AWS tools: options, environment, files, container, instance.

    Args:
        options: obstore's, with or without ``aws_`` before their names, and ``profile``.

    Raises:
        AccessError: A profile is named that no file has.
        MissingExtraError: The profile needs what only botocore can do.
    """
    config = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    env = os.environ
    named = config.pop("profile", None) or env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
    profile = _aws_profile(named)
    if "region" not in config and "default_region" not in config:
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region")
        if region:
            config["region"] = region
    endpoint = (
        config.pop("endpoint_url", None)
        or config.get("endpoint")
        or env.get("AWS_ENDPOINT_URL_S3")
        or env.get("AWS_ENDPOINT_URL")
        or env.get("AWS_ENDPOINT")
        or profile.get("endpoint_url")
    )
    if endpoint:
        config["endpoint"] = endpoint
    provider = None
    if not _is_true(config.get("skip_signature") or env.get("AWS_SKIP_SIGNATURE", "")):
        chosen = "profile" in {name.lower() for name in options}
        if "access_key_id" not in config and (chosen or not env.get("AWS_ACCESS_KEY_ID")):
            provider = _aws_provider(config, profile, named)
    return Access(config, provider, endpoint)


def _aws_provider(config: dict[str, str], profile: Mapping[str, str], named: str | None) -> SharedCredential | None:
    """Return what asks for a credential, or put the one that a profile has into `config`."""
    env = os.environ
    token_file = config.get("web_identity_token_file") or env.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    role = config.get("role_arn") or env.get("AWS_ROLE_ARN")
    if token_file and role:
        return _web_identity(config, token_file, role)
    if profile.get("aws_access_key_id") and not profile.get("role_arn"):
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile.get("aws_secret_access_key", "")
        if profile.get("aws_session_token"):
            config["session_token"] = profile["aws_session_token"]
        return None
    if any(name in profile for name in ("role_arn", "sso_session", "sso_start_url", "credential_process")):
        return _by_botocore(named or "default")
    path = env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    url = f"http://169.254.170.2{path}" if path else env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if url:
        return SharedCredential(f"aws container {url}", lambda: _aws_credential(ask_json(url, _container_headers())))
    if _is_true(env.get("AWS_EC2_METADATA_DISABLED", "")):
        return SharedCredential("aws none", _no_aws)
    server = (
        config.get("metadata_endpoint")
        or env.get("AWS_METADATA_ENDPOINT")
        or env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        or _AWS_METADATA
    ).rstrip("/")
    return SharedCredential(f"aws instance {server}", lambda: _aws_instance(server))


def _aws_profile(named: str | None) -> dict[str, str]:
    """Return what the two files of the AWS tools say of a profile; the credentials file comes first."""
    name = named or "default"
    env = os.environ
    config = _parse_ini(env.get("AWS_CONFIG_FILE") or "~/.aws/config")
    keys = _parse_ini(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    section = "default" if name == "default" else f"profile {name}"
    found = [source[part] for source, part in ((config, section), (keys, name)) if source.has_section(part)]
    if not found and named:
        raise AccessError(
            f"there is no AWS profile {name!r}",
            hint="look at AWS_PROFILE, ~/.aws/config and ~/.aws/credentials",
        )
    return {key: value for part in found for key, value in part.items()}


def _parse_ini(path: str) -> configparser.RawConfigParser:
    # default_section: a section [default] is one like the others here. Keys may contain a percent sign.
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    try:
        parser.read(Path(path).expanduser(), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # What the parser says quotes lines, which may be keys.
        raise AccessError(f"{path} cannot be understood", hint="it is read as the AWS tools read it") from None
    return parser


def _by_botocore(name: str) -> SharedCredential:
    try:
        sessions = import_module("botocore.session")
    except ImportError:
        raise MissingExtraError(
            f"the AWS profile {name!r} signs in by single sign-on, a role or a program, which botocore does",
            hint="pip install botocore, or put keys into the environment",
        ) from None

    def fetch() -> Fetched:
        try:
            found = sessions.Session(profile=name).get_credentials()
            keys = found.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001 - botocore's many errors mean one thing here
            raise AccessError(
                f"botocore gives no credentials for the profile {name!r}: {type(error).__name__}",
                hint=f"sign in: aws sso login --profile {name}",
            ) from None
        # The only place that says so; where it is not, half an hour is what obstore assumes too.
        expiry = getattr(found, "_expiry_time", None)
        expires = time.time() + 1800 if expiry is None else expiry.timestamp()
        return _aws_keys(keys.access_key, keys.secret_key, keys.token), expires

    return SharedCredential(f"aws profile {name} {os.environ.get('AWS_CONFIG_FILE', '')}", fetch)


def _web_identity(config: Mapping[str, str], token_file: str, role: str) -> SharedCredential:
    """Exchange a token of the cluster for one of AWS: AssumeRoleWithWebIdentity, which is not signed."""
    env = os.environ
    region = config.get("region") or "us-east-1"
    server = config.get("sts_endpoint") or env.get("AWS_STS_ENDPOINT") or env.get("AWS_ENDPOINT_URL_STS")
    server = server or f"https://sts.{region}.amazonaws.com"
    session = config.get("role_session_name") or env.get("AWS_ROLE_SESSION_NAME") or "shardset"

    def fetch() -> Fetched:
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": session,
            "WebIdentityToken": read_token(token_file),
        }
        answer = ask_json(server, {"Accept": "application/json"}, body=urlencode(form).encode())
        result = answer.get("AssumeRoleWithWebIdentityResponse", {}).get("AssumeRoleWithWebIdentityResult", {})
        found = result.get("Credentials", {})
        expires = found.get("Expiration")
        keys = _aws_keys(found.get("AccessKeyId"), found.get("SecretAccessKey"), found.get("SessionToken"))
        return keys, float(expires) if isinstance(expires, int | float) else _seconds(expires)

    return SharedCredential(f"aws role {server} {role} {session} {token_file}", fetch)


def _container_headers() -> dict[str, str]:
    """Return the login of the container's server; the file is read each time, since it is renewed."""
    path = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    token = read_token(path) if path else os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    return {"Authorization": token} if token else {}


def _aws_instance(server: str) -> Fetched:
    """Ask the metadata server of an EC2 instance, in its second version, which needs a token."""
    base = f"{server}/latest/meta-data/iam/security-credentials/"
    try:
        token = send(
            f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT"
        ).decode("ascii")
        headers = {"X-aws-ec2-metadata-token": token}
        role = send(base, headers).decode("utf-8").splitlines()[0].strip()
    except (AccessError, IndexError, UnicodeDecodeError):
        return _no_aws()
    return _aws_credential(ask_json(base + role, headers))


def _no_aws() -> Fetched:
    raise AccessError(
        "no AWS credentials were found: not in the options, the environment, the files in ~/.aws, nor on this machine",
        hint="run `aws configure`, or set AWS_PROFILE; a public bucket needs none: AWS_SKIP_SIGNATURE=true",
    )


def _aws_credential(answer: Mapping[str, Any]) -> Fetched:
    keys = _aws_keys(answer.get("AccessKeyId"), answer.get("SecretAccessKey"), answer.get("Token"))
    return keys, _seconds(answer.get("Expiration"))


def _aws_keys(key: str | None, secret: str | None, token: str | None) -> dict[str, str]:
    if not key or not secret:
        raise AccessError("what hands out AWS credentials answered without any", hint="look at the role's rights")
    return {"access_key_id": key, "secret_access_key": secret, **({"token": token} if token else {})}


# Google


def gcs_access(options: Mapping[str, str]) -> Access:
    """Find out how to reach Google Cloud Storage: options, environment, gcloud's file, metadata server.

    Args:
        options: obstore's, with or without ``google_`` before their names.

    Raises:
        MissingExtraError: The file needs what only google-auth can do.
    """
    config = {name.lower().removeprefix("google_"): value for name, value in options.items()}
    env = os.environ
    endpoint = config.get("base_url") or env.get("GOOGLE_BASE_URL")
    if _is_true(config.get("skip_signature") or env.get("GOOGLE_SKIP_SIGNATURE", "")):
        return Access(config, None, endpoint)
    own = ("service_account", "service_account_path", "service_account_key", "bearer_token")
    if any(name in config or env.get(f"GOOGLE_{name.upper()}") for name in own):
        return Access(config, None, endpoint)
    given = config.get("application_credentials") or env.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = env.get("CLOUDSDK_CONFIG") or (
        str(Path(env["APPDATA"]) / "gcloud") if os.name == "nt" and "APPDATA" in env else "~/.config/gcloud"
    )
    path = Path(given or Path(home) / "application_default_credentials.json").expanduser()
    if not given and not path.is_file():
        host = env.get("GCE_METADATA_HOST") or "metadata.google.internal"
        return Access(config, SharedCredential(f"google instance {host}", lambda: _google_instance(host)), endpoint)
    if _google_kind(path) in {"service_account", "authorized_user"}:
        config["application_credentials"] = str(path)
        return Access(config, None, endpoint)
    return Access(config, _by_google_auth(path), endpoint)


def _google_kind(path: Path) -> str:
    try:
        kind = orjson.loads(path.read_bytes())["type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise AccessError(
            f"{path} is no file of Google credentials", hint="run: gcloud auth application-default login"
        ) from None
    return str(kind)


def _by_google_auth(path: Path) -> SharedCredential:
    try:
        auth = import_module("google.auth")
        transport = import_module("google.auth.transport.requests")
    except ImportError:
        raise MissingExtraError(
            f"{path} describes a login that google-auth does",
            hint="pip install google-auth requests, or use a service account",
        ) from None

    def fetch() -> Fetched:
        try:
            found, _ = auth.load_credentials_from_file(
                str(path), scopes=["https://www.googleapis.com/auth/devstorage.read_write"]
            )
            found.refresh(transport.Request())
        except Exception as error:  # noqa: BLE001 - google-auth's many errors mean one thing here
            raise AccessError(f"google-auth gives no credentials for {path}: {type(error).__name__}") from None
        return {"token": found.token}, found.expiry.replace(tzinfo=UTC).timestamp() if found.expiry else None

    return SharedCredential(f"google file {path}", fetch)


def _google_instance(host: str) -> Fetched:
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    try:
        answer = ask_json(url, {"Metadata-Flavor": "Google"})
    except AccessError:
        raise AccessError(
            "no Google credentials were found: not in the options, the environment, gcloud's file, nor on this machine",
            hint="run: gcloud auth application-default login; a public bucket needs none: GOOGLE_SKIP_SIGNATURE=true",
        ) from None
    return _bearer(answer)


# Azure


def azure_access(options: Mapping[str, str], account: str | None) -> Access:
    """Find out how to reach Azure's blobs: options, environment, connection string, managed identity.

    Args:
        options: obstore's, with or without ``azure_`` or ``azure_storage_`` before their names, and
            ``connection_string``.
        account: The storage account, where the url names one.

    Raises:
        AccessError: Nothing names a storage account.
    """
    config = {name.lower().removeprefix("azure_").removeprefix("storage_"): value for name, value in options.items()}
    env = os.environ
    text = config.pop("connection_string", None) or env.get("AZURE_STORAGE_CONNECTION_STRING")
    if text and "account_name" not in config and account is None:
        config = {**_connection(text), **config}
    for name, alias in (("account_name", "ACCOUNT"), ("account_key", "KEY")):  # as the Azure command line calls them
        value = env.get(f"AZURE_STORAGE_{alias}")
        if value and name not in config and not env.get(f"AZURE_STORAGE_{name.upper()}"):
            config[name] = value
    if account is not None:
        config["account_name"] = account
    endpoint = config.get("endpoint") or env.get("AZURE_STORAGE_ENDPOINT") or env.get("AZURE_ENDPOINT")
    if "account_name" not in config and not env.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise AccessError(
            "no storage account is named",
            hint="set AZURE_STORAGE_ACCOUNT_NAME, or write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/...",
        )
    if _is_true(config.get("skip_signature") or env.get("AZURE_SKIP_SIGNATURE", "")):
        return Access(config, None, endpoint)
    own = (
        *("account_key", "access_key", "master_key", "sas_key", "sas_token", "token", "bearer_token"),
        *("client_secret", "federated_token_file", "use_azure_cli", "use_emulator"),
    )
    known = {
        name.removeprefix("AZURE_").removeprefix("STORAGE_").lower()
        for name, value in env.items()
        if value and name.startswith("AZURE_")
    }
    if any(name in config or name in known for name in own):
        return Access(config, None, endpoint)
    return Access(config, _managed_identity(config), endpoint)


def _connection(text: str) -> dict[str, str]:
    """Return the parts of a connection string as obstore names them."""
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    if _is_true(parts.get("UseDevelopmentStorage", "")):
        return {"use_emulator": "true", "account_name": "devstoreaccount1"}
    account = parts.get("AccountName", "")
    scheme, suffix = parts.get("DefaultEndpointsProtocol", "https"), parts.get("EndpointSuffix", "core.windows.net")
    endpoint = parts.get("BlobEndpoint", f"{scheme}://{account}.blob.{suffix}").rstrip("/")
    named = {
        "account_name": account or (urlsplit(endpoint).hostname or "").partition(".")[0],
        "account_key": parts.get("AccountKey", ""),
        "sas_key": parts.get("SharedAccessSignature", ""),
        "endpoint": endpoint,
    }
    return {name: value for name, value in named.items() if value}


def _managed_identity(config: Mapping[str, str]) -> SharedCredential:
    env = os.environ
    server = config.get("msi_endpoint") or env.get("AZURE_MSI_ENDPOINT") or env.get("IDENTITY_ENDPOINT")
    login = env.get("IDENTITY_HEADER")
    query = {
        "api-version": "2019-08-01",
        "resource": "https://storage.azure.com/",
        "client_id": config.get("client_id") or env.get("AZURE_CLIENT_ID"),
        "object_id": config.get("object_id") or env.get("AZURE_OBJECT_ID"),
        "msi_res_id": config.get("msi_resource_id") or env.get("AZURE_MSI_RESOURCE_ID"),
    }
    url = f"{server or _AZURE_METADATA}?{urlencode({name: value for name, value in query.items() if value})}"

    def fetch() -> Fetched:
        try:
            answer = ask_json(url, {"Metadata": "true", **({"X-IDENTITY-HEADER": login} if login else {})})
        except AccessError:
            raise AccessError(
                "no Azure credentials were found: not in the options, the environment, nor on this machine",
                hint="set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_USE_AZURE_CLI=true after "
                "`az login`; a public container needs none: AZURE_SKIP_SIGNATURE=true",
            ) from None
        return _bearer(answer)

    return SharedCredential(f"azure identity {url}", fetch)


def _bearer(answer: Mapping[str, Any]) -> Fetched:
    """Take a token and its end from an OAuth answer (RFC 6749, 5.1), or from Azure's, which gives the time itself."""
    token = answer.get("access_token")
    if not isinstance(token, str) or not token:
        raise AccessError("what hands out tokens answered without one")
    for name, start in (("expires_on", 0.0), ("expires_in", time.time())):
        with contextlib.suppress(ValueError):
            if name in answer:
                return {"token": token}, start + float(answer[name])
    return {"token": token}, time.time() + 600


def _seconds(text: str | None) -> float | None:
    """Return a time in ISO 8601 as seconds since 1970."""
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        return None


def _is_true(text: str) -> bool:
    return text.lower() in _TRUE
