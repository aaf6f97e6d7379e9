export PATH=/opt/holdfast/bin:$PATH
