"""The servers of docker/compose.yaml, here without containers: what one answered, the other drafts."""

import time
from pathlib import Path

import pytest
import yaml
from vllm_server import TOKENS, Server, complete, metric, server_of

from bench.lib import servers

DOCKER = Path(__file__).parents[2] / "docker"
HOME = "/srv/freedraft"
ACCEPTED = "freedraft_accepted_tokens_total"
PROMPT = "The three longest rivers of the world and their countries are"
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_each_has_ports_and_a_gpu_of_its_own_and_folders_that_its_user_may_write(services):
    image = (DOCKER / "vllm.Dockerfile").read_text()
    gpus = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services.values()]
    ports = [port.rpartition(":")[0] for service in services.values() for port in service["ports"]]
    assert gpus == [["0"], ["1"]] and len({*ports}) == len(ports) == 4
    for service in services.values():
        folders = [volume.partition(":")[2] for volume in service["volumes"]]
        assert service["environment"]["FREEDRAFT_DATASTORE"] in folders
        made = image.partition("RUN mkdir ")[2].splitlines()[0].split()
        assert folders == [f"{HOME}/{folder}" for folder in made], "others belong to root"


def test_what_one_answered_the_other_drafts(services, demo_model, tmp_path):
    made, pages = [], []
    for name, service in services.items():
        server = server_of(demo_model, tmp_path / f"{name}.log", {"method": "sssd"})
        own = {key: value.replace(HOME, str(tmp_path)) for key, value in service["environment"].items()}
        pages.append(servers.free_port())
        own |= {"FREEDRAFT_METRICS_PORT": str(pages[-1]), "FREEDRAFT_METRICS_HOST": servers.HOST}
        server.env |= own | {"FREEDRAFT_POLICY": "fixed"}
        made.append(server)
    one, two = (Server(server.port, (page,), server.log) for server, page in zip(made, pages, strict=True))
    with servers.running(*made):
        said = [complete(one.port, PROMPT)]
        time.sleep(5)  # several times as long as the other takes to see it
        said.append(complete(two.port, PROMPT))
        assert said[0] == said[1] and metric(one, ACCEPTED) < TOKENS / 2 < metric(two, ACCEPTED)
