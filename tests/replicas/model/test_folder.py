"""Where models lie is told without loading what runs them. What is refused is in `test_weights`, with all refusals."""

import subprocess
import sys


def test_a_command_line_may_ask_without_loading_torch():
    lines = (
        "import sys",
        "from holdfast.replicas.model.folder import model_folder, served_name",
        "assert (model_folder('pocket') / 'config.json').is_file()",
        "assert served_name('organisation/model') == 'organisation/model'",
        "import holdfast.cluster.model_files",
        "assert not {'torch', 'transformers'} & set(sys.modules)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
