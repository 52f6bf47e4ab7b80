"""MiniOneRec's scripts and parameters."""

import pytest

from rft_genrec.minionerec.names import RL, SCRIPTS, SFT, script

GUIDE_SCRIPTS = (
    *("sft.sh", "rl.sh", "evaluate.sh", "split.py", "merge.py", "calc.py", "rq/rqvae.py", "rq/rqkmeans_plus.sh"),
    *("rq/rqkmeans_plus.py", "rq/rqkmeans_faiss.py", "rq/rqkmeans_constrained.py", "rq/generate_indices.py"),
    *("convert_dataset.py", "data/amazon18_data_process.py", "rq/text2emb/amazon_text2emb.py"),
)
GUIDE_PARAMETERS = (
    *("freeze_LLM", "sid_index_path", "item_meta_path", "micro_batch_size", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "gpu_memory_utilization", "learning_rate"),
)


def test_every_script_of_the_guide_has_a_command() -> None:
    for path in GUIDE_SCRIPTS:
        assert script(path).line.startswith("rft-train genrec "), path
    assert script("rq/rqkmeans_plus.sh").line == "rft-train genrec sid --method rqkmeans_plus --collisions extra"
    with pytest.raises(KeyError):
        script("sasrec.py")


def test_every_parameter_of_the_guide_is_known() -> None:
    known = {parameter.name for record in (SFT, RL) for parameter in record.parameters}
    assert set(GUIDE_PARAMETERS) <= known


def test_a_parameter_is_accepted_or_refused_with_a_remedy() -> None:
    for record in SCRIPTS:
        names = [parameter.name for parameter in record.parameters]
        assert len(names) == len(set(names)), record.paths
        for parameter in record.parameters:
            assert bool(parameter.to) != bool(parameter.refusal), (record.paths, parameter)
            assert bool(parameter.do) == bool(parameter.refusal), (record.paths, parameter)
