import multiprocessing, os, time
import pytest, torch
import torch.distributed as dist
from tests.helpers.graphs import communities
from tests.helpers.launch import run_fit, SEED
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal
from tests.helpers.training import *
from lightning_gnnpipe import *
from lightning_gnnpipe.graph import chunk_order

def both(tmp_path, S=1, scale=1.0, oscale=1.0, oseed=SEED, orefresh=Refresh(), val=0, tol=1e-10):
    case = communities(5)
    exp = train_with_oracle(ReferenceModule("gcn"), case.data, case.partition, orders=lambda e: chunk_order(5, epoch=e, seed=oseed, shuffle=True), refresh=orefresh, num_epochs=4, cross_chunk_grad_scale=oscale)
    fit = run_fit(ReferenceModule("gcn"), case.data, num_stages=S, num_chunks=5, partition=case.partition, max_epochs=4, tmp_path=tmp_path, strategy_kwargs=dict(cross_chunk_grad_scale=scale), trainer_kwargs=dict(limit_val_batches=val))
    assert_steps_equal(fit.steps, exp, tol)
    return fit
def test_ok(tmp_path): both(tmp_path, tol=1e-13)
def test_bad_scale(tmp_path): both(tmp_path, scale=2.0)
def test_bad_seed(tmp_path): both(tmp_path, oseed=3)
def test_bad_rule(tmp_path): both(tmp_path, orefresh=Refresh(2))
@pytest.mark.parametrize("S",[1,2])
def test_val(tmp_path,S): both(tmp_path, S=S, val=1.0)
@pytest.mark.parametrize("S",[1,2])
def test_predict(tmp_path,S):
    fit = both(tmp_path, S=S)
    case = communities(5)
    m = ReferenceModule("gcn"); m.load_state_dict(fit.state_dict)
    print(fit.trainer.predict(fit.trainer.lightning_module, datamodule=FullGraphDataModule(case.data))[0][0], m.eval()(case.data)[0])
def test_leak_proc():
    p = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)); p.start()
def test_leak_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/f", rank=0, world_size=1); os.environ["LEAK"]="1"
def test_env(): assert "LEAK" not in os.environ and not dist.is_initialized()
