"""The live page answers programs that have its address, and acts only on requests of the page itself."""

import http.client
import json

import pytest

import forgefield
from forgefield.processes import this_process
from forgefield.report.live import answers
from forgefield.training.run.owner import OWNER
from tests.support.example_run import write_example_run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("a", "b")):
        write_example_run(folder / name, epochs=6, frames=4, seed=seed)
    (folder / "a/report.html").write_text("<script>evil()</script>")
    (folder / "a/.training.json").write_text(json.dumps({**this_process(), "hears_signals": True}))
    with forgefield.watch(folder, port=0) as live:
        yield live


@pytest.fixture
def sent(monkeypatch):
    """Requests that were sent to runs."""
    sent = []
    monkeypatch.setattr(answers, "send_request", lambda path, request: sent.append((path.name, request)))
    return sent


def ask(page, path, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    body = None if body is None else json.dumps(body).encode()
    given = {"Host": f"127.0.0.1:{page.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def post(page, request="checkpoint", run="a", **headers):
    usual = {
        "X_Forgefield_Token": page.token,
        "Origin": f"http://127.0.0.1:{page.port}",
        "Content_Type": "application/json",
    }
    return ask(page, f"/{page.token}/api/{request}", "POST", {"run": run}, **{**usual, **headers})


def test_the_page_and_its_files_are_served_with_a_policy_that_loads_nothing_from_elsewhere(page):
    for name in ("", "live.js", "charts.js", "live.css", "uPlot.iife.min.js", "uPlot.min.css"):
        answer, content = ask(page, f"/{page.token}/{name}")
        assert answer.status == 200
        assert content
        policy = answer.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert answer.getheader("Referrer-Policy") == "no-referrer"
        assert answer.getheader("Access-Control-Allow-Origin") is None


def test_the_port_is_open_on_this_machine_only(page):
    assert page._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/wrong/", "//", "/%00/", "//[", "/api/runs", "/wrong/api/runs"])
def test_without_the_token_nothing_is_answered(page, path):
    assert ask(page, path)[0].status == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "", None, "[::1"]
)
def test_a_website_that_gives_its_name_to_this_machine_gets_no_answer(page, host):
    host = host and host.format(port=page.port)
    assert ask(page, f"/{page.token}/api/runs", Host=host)[0].status == 404


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]:9000"])
def test_a_forwarded_port_works(page, host):
    assert ask(page, f"/{page.token}/api/runs", Host=host)[0].status == 200


def test_requests_of_the_page_are_sent_to_the_run(page, sent):
    answer, content = post(page)
    assert (answer.status, sent) == (200, [("a", "checkpoint")])
    assert "saves a checkpoint" in json.loads(content)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X_Forgefield_Token": None},
        {"X_Forgefield_Token": "wrong"},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
    ],
)
def test_requests_of_others_are_refused(page, sent, headers):
    assert post(page, **headers)[0].status == 403
    assert post(page, Host="evil.example", Origin="http://evil.example")[0].status == 404
    assert sent == []


def test_get_requests_change_nothing(page, sent):
    for request in ("stop", "checkpoint"):
        assert ask(page, f"/{page.token}/api/{request}?run=a", X_Forgefield_Token=page.token)[0].status == 404
    assert sent == []


def test_a_second_stop_is_not_sent_because_it_would_end_the_run_at_once(page, sent):
    assert post(page, "stop")[0].status == 200
    answer, content = post(page, "stop")
    assert answer.status == 409
    assert "was asked to stop" in json.loads(content)["error"]
    assert sent == [("a", "stop")]
    runs = json.loads(ask(page, f"/{page.token}/api/runs")[1])["runs"]
    assert runs[0]["requests"] == []


@pytest.mark.parametrize(("request_", "run"), [("stop", "../../etc"), ("stop", "b"), ("exit", "a"), ("stop", "")])
def test_refused_actions_are_explained(page, request_, run):
    answer, content = post(page, request_, run)
    assert answer.status == 409
    assert json.loads(content)["error"]


def test_only_runs_of_the_folder_are_shown(page):
    for path in ("api/run?run=../a", "api/run?run=/etc", "api/curves?run=..", "api/compare?run=a&run=nothing"):
        assert ask(page, f"/{page.token}/{path}")[0].status == 409
    assert ask(page, f"/{page.token}/report?run=../a")[0].status == 404
    assert ask(page, f"/{page.token}/../live.js")[0].status == 404


def test_an_answer_that_the_browser_has_is_not_sent_again(page):
    answer, _ = ask(page, f"/{page.token}/api/runs")
    tag = answer.getheader("ETag")
    again, content = ask(page, f"/{page.token}/api/runs", If_None_Match=tag)
    assert (again.status, content) == (304, b"")


def test_curves_are_those_of_the_file_and_are_thinned(page):
    _, content = ask(page, f"/{page.token}/api/curves?run=a&run=b&metric=val/loss")
    rows = [json.loads(line) for line in (page.folder / "b/metrics.jsonl").read_text().splitlines()]
    curve = json.loads(content)["runs"]["b"]
    assert curve["series"]["val/loss"] == [row["val/loss"] for row in rows]
    assert curve["epoch"] == [row["epoch"] + 1 for row in rows]
    assert curve["step"] == [row["step"] for row in rows]


def test_a_report_is_served_without_access_to_the_page(page):
    answer, content = ask(page, f"/{page.token}/report?run=a")
    assert answer.status == 200
    assert b"evil" in content
    assert answer.getheader("Content-Security-Policy").startswith("sandbox allow-scripts;")
    assert ask(page, f"/{page.token}/report?run=b")[0].status == 404


def test_the_address_of_a_run_shows_it_first(page):
    with forgefield.watch(page.folder / "b") as other:
        assert other.folder == page.folder
        assert other.address.endswith("/#run=b")
        assert other.port != page.port
    assert (page.folder / "a" / OWNER).exists(), "closing a page changes no run"
