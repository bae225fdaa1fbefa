"""Fields that families call by names of their own."""

from types import SimpleNamespace

from pagemill.artifacts.config_names import with_common_names


def test_usual_names_stand_beside_a_familys_own():
    assert with_common_names({"n_embd": 8, "n_layer": 2}) == {
        "n_embd": 8, "n_layer": 2, "hidden_size": 8, "num_hidden_layers": 2,
    }  # fmt: skip
    assert with_common_names({"n_embd": 8, "hidden_size": 16})["hidden_size"] == 16


def test_what_files_of_a_kind_leave_out():
    assert with_common_names({"model_type": "bloom", "max_position_embeddings": 64})["max_position_embeddings"] == 64
    assert with_common_names({"model_type": "bloom"})["max_position_embeddings"] == 2048


def test_sizes_of_a_made_config_fill_gaps_only():
    made = SimpleNamespace(hidden_size=8, vocab_size=50, num_hidden_layers="many", other=3)
    assert with_common_names({"hidden_size": 16}, made) == {"hidden_size": 16, "vocab_size": 50}
