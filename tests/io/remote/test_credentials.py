"""Credentials as each ecosystem has them, and none of them in what is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ckptconv.io.places import place_of
from ckptconv.io.remote import credentials
from ckptconv.io.remote.causes import told_by_obstore
from ckptconv.io.remote.credentials import account_in, endpoint_of, options_of, region_of
from ckptconv.io.remote.objects import ObjectStoreOf
from ckptconv.support.errors import UnsupportedCheckpoint
from helpers.certificates import certificate, serving
from helpers.program import run_process
from helpers.scripted_server import Web

SECRET = "MARKED-secret"
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "GCE_", "CLOUDSDK_")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch, tmp_path):
    """Nobody is anybody, and no machine of a cloud answers."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(credentials, "_on_gce", lambda: False)
    monkeypatch.setattr(credentials, "_region_told", lambda bucket: None)


def profile(home: Path, text: str, name: str = "config") -> None:
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / name).write_text(text)


# ---------------------------------------------------------------------------------------------- S3


def test_keys_of_the_environment_are_enough_and_botocore_is_not_imported(tmp_path):
    told = (
        "import sys\n"
        "from ckptconv.io.remote.credentials import options_of\n"
        "options = options_of('s3', 'b')\n"
        "print(options['access_key_id'], options['region'], 'botocore' in sys.modules)\n"
        "import os; os._exit(sys.stdout.flush() or 0)"
    )
    env = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "eu-west-1"}
    # a process of its own: forks of the tests have botocore
    done = run_process(cwd=tmp_path, env=env, command=(sys.executable, "-c", told))
    assert done.out == "k eu-west-1 False\n", done.err


def test_profiles(tmp_path, monkeypatch):
    profile(tmp_path, "[profile work]\nregion = eu-central-1\nendpoint_url = http://store:9000\n")
    text = f"[work]\naws_access_key_id = k\naws_secret_access_key = {SECRET}\n"
    profile(tmp_path, text + "aws_session_token = t\n", "credentials")
    monkeypatch.setenv("AWS_PROFILE", "work")
    options = options_of("s3", "bucket")
    assert options["region"] == "eu-central-1"
    assert (options["endpoint"], options["virtual_hosted_style_request"]) == (
        "http://store:9000", False,
    )  # fmt: skip
    assert options["client_options"]["allow_http"]
    given = options["credential_provider"]()
    assert (given["access_key_id"], given["secret_access_key"], given["token"]) == (
        "k",
        SECRET,
        "t",
    )
    assert given["expires_at"].tzinfo is not None


def test_a_process_gives_credentials(tmp_path):
    answer = {"Version": 1, "AccessKeyId": "from-process", "SecretAccessKey": SECRET}
    (tmp_path / "answer").write_text(json.dumps(answer))
    profile(tmp_path, f"[default]\ncredential_process = cat {tmp_path / 'answer'}\n")
    assert options_of("s3", "bucket")["credential_provider"]()["access_key_id"] == "from-process"


def test_a_process_that_fails_is_told_without_its_words(tmp_path):
    profile(tmp_path, f"[default]\ncredential_process = sh -c 'echo {SECRET} >&2; exit 1'\n")
    with pytest.raises(
        UnsupportedCheckpoint, match="the program that gives the credentials fails"
    ) as raised:
        place_of("s3://bucket/a.pt")
    assert SECRET not in str(raised.value) and raised.value.path == "s3://bucket/a.pt"


def test_a_profile_that_is_not_there_is_told(tmp_path, monkeypatch):
    profile(tmp_path, "[default]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    with pytest.raises(UnsupportedCheckpoint, match="there is no such profile; see AWS_PROFILE"):
        place_of("s3://bucket/a.pt")


def test_a_file_of_profiles_that_cannot_be_parsed_is_named(tmp_path):
    profile(tmp_path, "garbage\n")
    with pytest.raises(UnsupportedCheckpoint, match=rf"parsed \({tmp_path}/\.aws/config\)"):
        place_of("s3://bucket/a.pt")


@pytest.mark.parametrize(
    "changes",
    [{}, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SKIP_SIGNATURE": "true"}],
)
def test_a_bucket_that_anybody_may_read_needs_nobody(changes, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    options = options_of("s3", "bucket")
    assert options["skip_signature"] is True
    assert "secret_access_key" not in options and "credential_provider" not in options


def test_endpoints(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all:1/")
    assert endpoint_of("s3") == "https://all:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://own:1")
    assert endpoint_of("s3") == "https://own:1"
    assert "allow_http" not in options_of("s3", "b")["client_options"]
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert endpoint_of("s3") is None
    assert options_of("s3", "bucket")["virtual_hosted_style_request"] is True
    assert "virtual_hosted_style_request" not in options_of("s3", "a.bucket")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert endpoint_of("gs") == "http://localhost:4443"


def test_the_region_is_asked_for_where_nobody_says_it(monkeypatch):
    asked = []

    def told(bucket: str) -> str:
        asked.append(bucket)
        return "ap-south-1"

    monkeypatch.setattr(credentials, "_region_told", told)
    assert region_of("bucket", None) == "ap-south-1"
    assert region_of("bucket", "http://store:9000") == "us-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert region_of("bucket", None) == "eu-north-1"
    assert asked == ["bucket"]


def test_the_region_is_what_s3_names_in_its_answer(monkeypatch):
    monkeypatch.undo()
    with Web() as web:
        web.ways["named"] = lambda asked: asked.say(403, x_amz_bucket_region="eu-west-3")
        monkeypatch.setattr(credentials, "AWS", web.url.rstrip("/"))
        assert credentials._region_told.__wrapped__("named") == "eu-west-3"
        assert credentials._region_told.__wrapped__("unnamed") is None
        monkeypatch.setattr(credentials, "AWS", "http://127.0.0.1:9")
        assert credentials._region_told.__wrapped__("down") is None


def test_the_region_is_asked_for_with_the_certificates_of_the_rest(monkeypatch, tmp_path):
    monkeypatch.undo()
    file = certificate(tmp_path, "127.0.0.1")
    with Web(context=serving(file)) as web:
        web.ways["named"] = lambda asked: asked.say(403, x_amz_bucket_region="eu-west-3")
        monkeypatch.setattr(credentials, "AWS", web.url.rstrip("/"))
        assert credentials._region_told.__wrapped__("named") is None
        monkeypatch.setenv("AWS_CA_BUNDLE", f"{file}.crt")
        assert credentials._region_told.__wrapped__("named") == "eu-west-3"


def test_a_file_of_certificates_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nosuch.pem")
    with pytest.raises(UnsupportedCheckpoint, match="AWS_CA_BUNDLE") as raised:
        place_of("s3://bucket/a.pt")
    assert raised.value.path == "/nosuch.pem"


def test_a_profile_names_certificates_for_the_keys_of_the_environment_too(tmp_path, monkeypatch):
    profile(tmp_path, "[default]\nca_bundle = /nosuch.pem\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(UnsupportedCheckpoint, match="ca_bundle names it") as raised:
        place_of("s3://bucket/a.pt")
    assert raised.value.path == "/nosuch.pem"


def test_a_role_for_which_no_region_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    role = "role_arn = arn:aws:iam::123456789012:role/x\nsource_profile = own\n"
    own = f"[profile own]\naws_access_key_id = k\naws_secret_access_key = {SECRET}\n"
    profile(tmp_path, f"[default]\n{role}{own}")
    with pytest.raises(PermissionError) as raised:
        options_of("s3", "bucket")["credential_provider"]()
    assert "set AWS_DEFAULT_REGION" in (told_by_obstore(raised.value, "s3").hint or "")


# --------------------------------------------------------------------------- Google Cloud, Azure


def test_google_signs_where_there_is_somebody(tmp_path, monkeypatch):
    assert options_of("gs", "b")["skip_signature"] is True
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "a.json")
    assert "skip_signature" not in options_of("gs", "b")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    folder = tmp_path / "gcloud"
    folder.mkdir()
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
    assert options_of("gs", "b")["skip_signature"] is True
    file = folder / "application_default_credentials.json"
    file.write_text("{}")  # which obstore would look for in its usual place only
    options = options_of("gs", "b")
    assert options["application_credentials"] == str(file) and "skip_signature" not in options


def test_a_file_of_google_that_is_wrong_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "a.json"))
    with pytest.raises(UnsupportedCheckpoint, match=r"with the credentials in .*a\.json; check"):
        place_of("gs://bucket/a.pt")


def test_an_emulator_of_google_asks_for_no_token(monkeypatch):
    """Where signatures are only left out, obstore asks the metadata server when it writes."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    options = options_of("gs", "b")
    account = json.loads(options["service_account_key"])
    assert account["gcs_base_url"] == "http://localhost:4443" and account["disable_oauth"] is True
    assert options["client_options"]["allow_http"] is True


def test_the_names_that_the_tools_of_azure_know(monkeypatch):
    with pytest.raises(UnsupportedCheckpoint, match="names no account of Azure") as raised:
        place_of("az://container/a.pt")
    assert raised.value.path == "az://container/a.pt"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", SECRET)
    options = options_of("az", "container")
    assert (options["account_name"], options["account_key"]) == ("mine", SECRET)
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sig=x")
    assert options_of("az", "container")["sas_key"] == "sig=x"


def test_a_connection_string(monkeypatch):
    text = f"DefaultEndpointsProtocol=http;AccountName=mine;AccountKey={SECRET}==;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text + "BlobEndpoint=http://here:1/mine;")
    options = options_of("az", "container")
    assert (options["account_name"], options["account_key"]) == ("mine", f"{SECRET}==")
    assert options["endpoint"] == "http://here:1/mine"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    assert options_of("az", "container")["account_name"] == "devstoreaccount1"


def test_the_suffix_in_a_connection_string(monkeypatch):
    text = f"AccountName=mine;AccountKey={SECRET};EndpointSuffix=core.chinacloudapi.cn"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert options_of("az", "c")["endpoint"] == "https://mine.blob.core.chinacloudapi.cn"


def test_the_account_in_an_address(monkeypatch):
    address = "abfss://models@mine.dfs.core.windows.net/run/a.pt"
    monkeypatch.setenv("AZURE_STORAGE_KEY", "bWFya2Vk")
    place = place_of(address)
    assert str(place) == address
    store = place.site.store
    assert isinstance(store, ObjectStoreOf) and store.bucket == "models"
    assert account_in("models") == ("models", None)
    options = options_of("az", "models", host="mine.blob.core.chinacloudapi.cn")
    assert options["endpoint"] == "https://mine.blob.core.chinacloudapi.cn"
    assert options["account_name"] == "mine"


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"])
def test_what_opens_one_account_is_not_shown_to_another(variable, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv(variable, SECRET)
    with pytest.raises(UnsupportedCheckpoint, match="is in the account other, and") as raised:
        place_of("abfss://models@other.dfs.core.windows.net/a.pt")
    assert SECRET not in str(raised.value)
    assert options_of("az", "models", host="mine.blob.core.windows.net")["account_name"] == "mine"


def test_the_endpoint_of_one_account_is_not_that_of_another(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://here:1/mine")
    mine = options_of("az", "models", host="mine.blob.core.windows.net")
    assert mine["endpoint"] == "http://here:1/mine"
    other = options_of("az", "models", host="other.blob.core.windows.net")
    assert other["endpoint"] == "https://other.blob.core.windows.net"


@pytest.mark.parametrize(
    "host", ["evil.example", "mine.dfs.core.windows.net.evil.example", "mine", "a@b"]
)
def test_a_host_that_is_not_azures_is_refused(host, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SECRET)
    with pytest.raises(UnsupportedCheckpoint, match="names no account of Azure"):
        place_of(f"abfss://models@{host}/a.pt")


# ------------------------------------------------------------------------------- nothing is told


def test_no_store_shows_what_it_was_opened_with(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", SECRET)
    place = place_of("s3://bucket/a.pt")
    for shown in (place, place.site, place.site.store, place.path, place.site.store.client):
        assert SECRET not in f"{shown!r} {shown}"
    with pytest.raises(
        UnsupportedCheckpoint, match="cannot be opened with these settings"
    ) as raised:
        place_of("az://container/a.pt")  # its key is not base64
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__context__ is None
